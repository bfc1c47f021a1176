"""Launching: from settings to the processes of a run."""

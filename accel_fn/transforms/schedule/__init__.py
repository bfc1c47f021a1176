"""Transforms that change learning rates during a run."""

"""Checkpoints: whole or invisible, of one run at any world size."""

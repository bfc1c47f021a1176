"""Observe a run: evaluate, predict, log, profile, show progress, and explain a step."""

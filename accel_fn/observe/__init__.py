"""Observe a run: evaluation, metrics, memory, explanations."""

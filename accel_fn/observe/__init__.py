"""Looking at a run: evaluation, metrics, memory, explanations."""

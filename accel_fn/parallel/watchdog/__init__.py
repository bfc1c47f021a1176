"""Hang detection: which collective each rank is in, and the end of a run that hangs."""

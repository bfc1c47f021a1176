"""Readers of the variables that clusters set: for each process, or for each machine."""

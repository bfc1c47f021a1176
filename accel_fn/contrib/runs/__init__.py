"""Runs by their logs: the commands `report`, `plot` and `watch`."""

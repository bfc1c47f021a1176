"""Read the logs of runs: the commands `report`, `plot` and `watch`."""

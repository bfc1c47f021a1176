"""Training with the same bits for every number of ranks."""

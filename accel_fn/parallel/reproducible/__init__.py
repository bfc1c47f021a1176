"""The same bits for every number of ranks."""

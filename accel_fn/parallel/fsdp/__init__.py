"""Shards of parameters, gradients and optimizer state."""

"""FSDP: each rank holds shards of parameters, gradients and optimizer state."""

"""The base of all packages: the state, batches as trees of tensors, weights, random generators."""

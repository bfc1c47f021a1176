"""What everything else stands on: the state, batches as trees of tensors, weights, random generators."""

"""One training step: the plan, the gradients, the update."""

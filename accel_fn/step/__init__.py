"""What one training step is: the plan, the gradients, the update."""

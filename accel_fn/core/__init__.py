"""What one training step is: a loop over micro-batches around one exact mean."""

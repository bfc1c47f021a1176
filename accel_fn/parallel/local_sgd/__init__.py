"""Local SGD: ranks update on their own batches, and average from time to time."""

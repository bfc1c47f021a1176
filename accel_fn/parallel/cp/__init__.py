"""Context parallelism: each rank along an axis computes a block of the tokens of every sequence."""

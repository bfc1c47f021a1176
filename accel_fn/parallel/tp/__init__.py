"""Tensor parallelism: each rank along an axis of the mesh holds a part of each matrix."""

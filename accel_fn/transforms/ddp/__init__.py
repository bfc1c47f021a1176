"""Replicas whose gradients are averaged."""

"""Transforms for training in mixed precision."""

"""Transforms that use torch's compiler."""

"""Torch's compiler."""

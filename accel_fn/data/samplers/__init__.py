"""Loaders with a sampler of the user's."""

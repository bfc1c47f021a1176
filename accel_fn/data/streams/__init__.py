"""Loaders over data sets that can only be iterated."""

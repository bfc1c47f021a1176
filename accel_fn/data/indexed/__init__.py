"""Loaders over data sets that can be indexed."""

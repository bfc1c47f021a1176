"""Ranks that train apart and average now and then."""

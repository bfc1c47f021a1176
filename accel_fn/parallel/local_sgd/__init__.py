"""Ranks that update on their own parts and average now and then."""

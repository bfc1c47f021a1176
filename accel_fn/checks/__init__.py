"""Checks of a user's program: observers that refuse or warn, on by default."""

"""Checks of a user's program: what they find is refused, or warned of once. A reader may skip them."""

"""What the library's own tests look at or break beyond the public names, on one page.

Nothing here is for users: names and meaning change with the code. When a file of the library
moves, this page is what follows it, and no test does.
"""

from __future__ import annotations

from accel_fn.transforms.local_sgd import average_ranks

# ---- step

# ---- ranks

# ---- data

# ---- transforms

average_over_ranks = average_ranks.average
"""Replaces tensors by their weighted mean over the ranks, as `local_sgd` does."""

# ---- checkpoint

# ---- observe

"""What the library's own tests look at or break beyond the public names, on one page.

Nothing here is for users: names and meaning change with the code. When a file of the library
moves, this page is what follows it, and no test does.
"""

# ---- step

# ---- ranks

# ---- data

# ---- transforms

# ---- checkpoint

# ---- observe

"""The samples that a rank sees, and when: pure index arithmetic, and loaders that follow it."""

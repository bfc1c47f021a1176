"""Which samples a rank sees, and when: pure index arithmetic, and loaders that follow it."""

"""Training on workers of Ray, with the real library: `nox -s ray`."""

"""Ten programs to run on a machine with an accelerator, in order; `nox -s gpu` writes a report."""

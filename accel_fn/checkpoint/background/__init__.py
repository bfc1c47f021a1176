"""Writing a checkpoint while the run goes on."""

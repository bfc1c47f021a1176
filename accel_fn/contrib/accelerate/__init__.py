"""Read files that accelerate wrote: its configuration for a launch, and its checkpoints."""

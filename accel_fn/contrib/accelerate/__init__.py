"""Files that accelerate wrote: its configuration, given to a launch, and its checkpoints."""

"""The built-in transforms. A transform fills slots of a plan, and does nothing else."""

"""The built-in transforms, one idea per file; each fills slots of a plan and does nothing else."""

"""The built-in transforms, one idea a file; each fills slots of a plan and nothing else."""

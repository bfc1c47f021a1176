"""The files of a checkpoint."""

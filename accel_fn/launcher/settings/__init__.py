"""The settings of a launch and where each comes from."""

"""The machines of a launch and how they find each other."""

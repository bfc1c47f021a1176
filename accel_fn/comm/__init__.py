"""Process groups, collectives and the watchdog."""

"""How ranks find each other and share a step: strategies, meshes, collectives, the watchdog."""

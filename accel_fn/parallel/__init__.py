"""How ranks find each other and share the work of a step: strategies, meshes, collectives, watchdog."""

"""Bugs that the field knows, planted in the library one by one: `nox -s mutants`."""

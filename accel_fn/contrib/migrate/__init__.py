"""Reads a script that uses accelerate: the table of names, and the lines in which they stand."""

"""A function run by every rank of a new world."""

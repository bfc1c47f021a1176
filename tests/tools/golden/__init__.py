"""Bits of a table of runs, before and after a change that should change none."""

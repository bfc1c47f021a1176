"""A catalogue of programs of the kinds that people write.

A kind is a function in `data.py`, `losses.py`, `models.py` or `loops.py`. It takes the numbers of a
program and returns the loop by hand over whole batches, the program with accel_fn as people write
it, and, where that is refused or warned of, the repaired program.
"""

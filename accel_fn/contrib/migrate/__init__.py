"""Read a script that uses accelerate: a table of names, and the lines that use them."""

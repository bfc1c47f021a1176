"""Find the replacement of accelerate in a script, and verify the program that replaces the script."""

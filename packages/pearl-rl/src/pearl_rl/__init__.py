"""PEARL: rl."""

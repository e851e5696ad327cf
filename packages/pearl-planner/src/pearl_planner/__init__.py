"""PEARL: planner."""

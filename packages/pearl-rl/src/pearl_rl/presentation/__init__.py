"""What people see of a run: a live view on a terminal, one line a step elsewhere, and tables."""

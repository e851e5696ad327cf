"""Settings of PEARL as configurations of other frameworks, and one line for what has no counterpart there."""

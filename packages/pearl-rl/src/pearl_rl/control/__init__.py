"""The control loop around the pure core."""

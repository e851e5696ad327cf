"""What the papers measured, reproduced in simulation: one module for each figure or table."""

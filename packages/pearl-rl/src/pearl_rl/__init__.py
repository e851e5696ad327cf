"""PEARL put together: control loop, rollout, training, simulation, and the command line."""

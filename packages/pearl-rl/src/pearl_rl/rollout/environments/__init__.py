"""Environments: what an agent acts in, one instance a trajectory, each with its own latency."""

"""Rollout: asynchronous agentic trajectories over workers that come and go."""

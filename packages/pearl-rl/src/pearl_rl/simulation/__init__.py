"""A cluster in virtual time: the production control plane over simulated engines, trainer, and availability."""

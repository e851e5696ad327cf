"""Runtimes: what the executor ports are on one machine (`local`) and on a cluster (`ray`)."""

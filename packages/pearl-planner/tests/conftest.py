"""Hypothesis for busy machines: no test fails for being slow."""

from hypothesis import settings

settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

"""PEARL: telemetry."""

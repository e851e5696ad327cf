"""PEARL's telemetry: in comes what was measured, out goes a workload profile; OpenTelemetry instruments."""

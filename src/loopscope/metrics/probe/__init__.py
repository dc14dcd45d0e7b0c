"""Metrics that exist for a fixed corpus only: pure functions, each with its oracle in tests/metrics/probe."""

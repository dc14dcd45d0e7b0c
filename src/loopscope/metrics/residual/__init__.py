"""Metrics of the `residual` table, one family per file."""

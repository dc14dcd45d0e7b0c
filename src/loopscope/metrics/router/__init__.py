"""Metrics of the `router` table, one family per file."""

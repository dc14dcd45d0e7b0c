"""Metrics of the `transition` table, one family per file."""

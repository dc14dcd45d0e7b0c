"""Sealing: journals that nobody writes any more become Parquet parts."""

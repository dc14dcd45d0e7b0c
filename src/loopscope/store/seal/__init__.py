"""Sealing: journals that no process writes any more become Parquet parts."""

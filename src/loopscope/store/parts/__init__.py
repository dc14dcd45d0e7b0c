"""Sealed Parquet parts: how they are written and encoded, and the ledger of what a journal became."""

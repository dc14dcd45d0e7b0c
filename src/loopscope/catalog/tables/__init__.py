"""The declarations of every table, one file each."""

"""The remote copy of a run: its address, the snapshot that is copied, and the thread that uploads it."""

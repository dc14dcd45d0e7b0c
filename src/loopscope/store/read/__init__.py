"""Reading a run: its files, which rows are live, verification, and compaction of what was read."""

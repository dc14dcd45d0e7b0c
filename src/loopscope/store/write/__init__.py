"""Writing a run: the store, the writer of each process, and the background thread."""

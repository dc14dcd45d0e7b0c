"""The crash-safe journal: frames, how they are written, how they are decoded, and their rows as Arrow columns."""

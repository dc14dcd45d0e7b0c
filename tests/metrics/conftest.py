"""Puts this folder on the path, so that the tests in its subfolders find the oracle."""

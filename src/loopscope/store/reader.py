"""The old path of `loopscope.store.read.reader`, which users' code imports."""

from loopscope.store.read.reader import RunReader, read_table

__all__ = ["RunReader", "read_table"]

"""Rows of a run on disk: schemas, the crash-safe journal, sealed Parquet parts, and the reader."""

from loopscope.store.attempts import LiveRange, live_ranges
from loopscope.store.files import Problem
from loopscope.store.manifest import Attempt, Manifest, read_manifest
from loopscope.store.options import StoreOptions
from loopscope.store.reader import RunReader, read_table
from loopscope.store.remote import Remote
from loopscope.store.run_store import RunStore
from loopscope.store.schema import Column, TableSchema
from loopscope.store.tables import TABLES
from loopscope.store.writer import RowWriter

__all__ = [
    "TABLES",
    "Attempt",
    "Column",
    "LiveRange",
    "Manifest",
    "Problem",
    "Remote",
    "RowWriter",
    "RunReader",
    "RunStore",
    "StoreOptions",
    "TableSchema",
    "live_ranges",
    "read_manifest",
    "read_table",
]

"""Rows of a run on disk: schemas, the crash-safe journal, sealed Parquet parts, and the reader."""

from loopscope.store.attempts import LiveRange, live_ranges
from loopscope.store.manifest import Attempt, Manifest, read_manifest
from loopscope.store.mirror.remote import Remote
from loopscope.store.options import StoreOptions
from loopscope.store.read.files import Problem
from loopscope.store.read.reader import RunReader, read_table
from loopscope.store.row_writer import RowWriter
from loopscope.store.schema import Column, TableSchema
from loopscope.store.tables import TABLES
from loopscope.store.write.journal_writer import JournalWriter
from loopscope.store.write.run_store import RunStore

__all__ = [
    "TABLES",
    "Attempt",
    "Column",
    "JournalWriter",
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

"""From traces to rows: partial sums per microbatch, one transfer per traced step, rows to the writer."""

from loopscope.collect.collector import ParquetCollector
from loopscope.collect.context import RowContext
from loopscope.collect.reduce import reduce_trace
from loopscope.collect.strata import ProbeCorpus
from loopscope.collect.writer import MemoryWriter, RowWriter

__all__ = [
    "MemoryWriter",
    "ParquetCollector",
    "ProbeCorpus",
    "RowContext",
    "RowWriter",
    "reduce_trace",
]

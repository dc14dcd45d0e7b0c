"""From traces to rows: partial sums per microbatch, one transfer per traced step, rows to the writer."""

from loopscope.collect.collector import Collector, ParquetCollector
from loopscope.collect.context import RowContext
from loopscope.collect.corpus_losses import ProbeCorpus
from loopscope.collect.memory import planned_trace_bytes
from loopscope.collect.observed import ObservedWriter, RowObserver
from loopscope.collect.pending_losses import DeviceLoss
from loopscope.collect.ranks import GroupReducer, LocalReducer, RankReducer
from loopscope.collect.reduce import reduce_trace
from loopscope.collect.writer import MemoryWriter, NullWriter
from loopscope.store import RowWriter

__all__ = [
    "Collector",
    "DeviceLoss",
    "GroupReducer",
    "LocalReducer",
    "MemoryWriter",
    "NullWriter",
    "ObservedWriter",
    "ParquetCollector",
    "ProbeCorpus",
    "RankReducer",
    "RowContext",
    "RowObserver",
    "RowWriter",
    "planned_trace_bytes",
    "reduce_trace",
]

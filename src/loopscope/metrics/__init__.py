"""Pure reductions: tensors in, partial sums and values out. The single definition of every metric.

Device phase: `reduce_visit` and `reduce_pair` give two float64 vectors, laid out by `visit_layout` and
`pair_layout`, that merge over microbatches and ranks by + and max. Host phase: `finish_visits` and
`finish_pairs` give the columns of all visits and pairs of one layout. What each column is, the catalogue declares.
"""

from loopscope.metrics.family import EMPTY, POISON
from loopscope.metrics.faults import Fault
from loopscope.metrics.finish import (
    FinishedColumns,
    FinishedPairs,
    FinishedVisits,
    finish_pairs,
    finish_visits,
    raise_fatal,
)
from loopscope.metrics.kernels import WarmUp, forget_kernels, warm_up, warm_up_like
from loopscope.metrics.layout import Layout
from loopscope.metrics.loss import CLOSURE_TOLERANCE, FinishedLoss, finish_loss
from loopscope.metrics.pack import Reduced
from loopscope.metrics.reduce import reduce_pair, reduce_visit, seal_rank
from loopscope.metrics.registry import pair_layout, visit_layout
from loopscope.metrics.tensors import PairTensors, VisitTensors, check_pair, check_visit

__all__ = [
    "CLOSURE_TOLERANCE",
    "EMPTY",
    "POISON",
    "Fault",
    "FinishedColumns",
    "FinishedLoss",
    "FinishedPairs",
    "FinishedVisits",
    "Layout",
    "PairTensors",
    "Reduced",
    "VisitTensors",
    "WarmUp",
    "check_pair",
    "check_visit",
    "finish_loss",
    "finish_pairs",
    "finish_visits",
    "forget_kernels",
    "pair_layout",
    "raise_fatal",
    "reduce_pair",
    "reduce_visit",
    "seal_rank",
    "visit_layout",
    "warm_up",
    "warm_up_like",
]

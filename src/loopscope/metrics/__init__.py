"""Pure reductions: tensors in, partial sums and values out. The single definition of every metric.

Device phase: `reduce_visit` and `reduce_pair` give two float64 vectors, laid out by `visit_layout` and
`pair_layout`, that merge over microbatches and ranks by + and max. Host phase: `finish_visit` and
`finish_pair` give the columns.
"""

from loopscope.metrics.faults import Fault
from loopscope.metrics.finish import FinishedPair, FinishedVisit, finish_pair, finish_visit, raise_fatal
from loopscope.metrics.kernels import WarmUp, forget_kernels, warm_up, warm_up_like
from loopscope.metrics.layout import PAIR_KINDS, Layout, pair_layout, visit_layout
from loopscope.metrics.loss import CLOSURE_TOLERANCE, FinishedLoss, finish_loss
from loopscope.metrics.metric import Metric
from loopscope.metrics.pack import Reduced, empty_reduced
from loopscope.metrics.partials import EMPTY, POISON
from loopscope.metrics.probe.registry import PROBE_REGISTRY
from loopscope.metrics.reduce import reduce_pair, reduce_visit, seal_rank
from loopscope.metrics.registry import REGISTRY
from loopscope.metrics.tensors import PairTensors, VisitTensors, check_pair, check_visit

__all__ = [
    "CLOSURE_TOLERANCE",
    "EMPTY",
    "PAIR_KINDS",
    "POISON",
    "PROBE_REGISTRY",
    "REGISTRY",
    "Fault",
    "FinishedLoss",
    "FinishedPair",
    "FinishedVisit",
    "Layout",
    "Metric",
    "PairTensors",
    "Reduced",
    "VisitTensors",
    "WarmUp",
    "check_pair",
    "check_visit",
    "empty_reduced",
    "finish_loss",
    "finish_pair",
    "finish_visit",
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

"""Distance of a loop state from the loop's input: the last head output, before any injection."""

from loopscope.metrics.context import PairContext
from loopscope.metrics.family import Family, FoundColumns, Partials


def _finish(p: Partials) -> FoundColumns:
    return {"input_distance": p.mean("delta_norm")}


FAMILY: Family[PairContext] = Family(
    module=__name__,
    finish=_finish,
)

"""How clear a choice is, of the choice scores r in falling order: the margin among the chosen, r_(1) − r_(k), and the
selection gap r_(k) − r_(k+1), which says how nearly another expert set would have been chosen."""

import torch
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import NOT_APPLICABLE, Family, FoundColumns, Partials, Slot, SlotTensors
from loopscope.metrics.histogram import histogram, quantile


def _sums(c: VisitContext, name: str, difference_N: Tensor) -> SlotTensors:
    return {
        name: c.total(difference_N),
        f"{name}_neg_min": c.highest(-difference_N),
        f"{name}_hist": histogram(torch.nan_to_num(difference_N), c.valid_N),
    }


def _partial(c: VisitContext) -> SlotTensors:
    first_N, kth_N, next_N = c.leading_N
    # At k = E there is no next expert; the gap's slots are filled with zeros and its columns are not_applicable.
    return {**_sums(c, "margin", first_N - kth_N), **_sums(c, "selection_gap", kth_N - next_N)}


def _columns(p: Partials, name: str, percentiles: tuple[int, ...], *, exists: bool) -> FoundColumns:
    hist = p[f"{name}_hist"]
    found = {
        f"{name}_mean": p.mean(name),
        f"{name}_min": -p.number(f"{name}_neg_min"),
        f"{name}_hist": hist,
        **{f"{name}_p{q:02}": quantile(hist, q / 100) for q in percentiles},
    }
    return found if exists else dict.fromkeys(found, NOT_APPLICABLE)


def _finish(p: Partials) -> FoundColumns:
    return {
        **_columns(p, "margin", (25, 50, 75), exists=p.top_k > 1),
        **_columns(p, "selection_gap", (1,), exists=p.top_k < p.num_experts),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(
        Slot("margin"),
        Slot("margin_hist", "bins"),
        Slot("selection_gap"),
        Slot("selection_gap_hist", "bins"),
    ),
    maxima=(Slot("margin_neg_min"), Slot("selection_gap_neg_min")),
    partial=_partial,
    finish=_finish,
)

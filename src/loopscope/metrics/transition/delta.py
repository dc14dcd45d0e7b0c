"""How far a block output moves: ‖D‖, relative to where it was, and in which direction. D = h_to − h_from."""

from loopscope.metrics.context import PairContext
from loopscope.metrics.dense import bad_entries, safe_ratio
from loopscope.metrics.family import Family, FoundColumns, Partials, Slot, SlotTensors


def _partial(c: PairContext) -> SlotTensors:
    relative_N, excluded_N = safe_ratio(c.delta_norm_N, c.from_norm_N)
    growth_N, _ = safe_ratio(c.to_norm_N, c.from_norm_N)
    cosine_N, no_cosine_N = safe_ratio((c.from_ND * c.to_ND).sum(-1), c.from_norm_N * c.to_norm_N)
    return {
        "delta_norm": c.total(c.delta_norm_N),
        "relative_delta": c.total(relative_N),
        "growth": c.total(growth_N),
        "ratio_excluded": c.total(excluded_N.float()),
        "state_cosine": c.total(cosine_N),
        "cosine_excluded": c.total(no_cosine_N.float()),
        "nonfinite_residual": c.total(
            bad_entries(c.from_ND, fusible=c.fusible) + bad_entries(c.to_ND, fusible=c.fusible)
        ),
    }


def _finish(p: Partials) -> FoundColumns:
    excluded = p.number("ratio_excluded")
    return {
        "delta_norm_mean": p.mean("delta_norm"),
        "relative_delta": p.mean_without("relative_delta", "ratio_excluded"),
        "relative_delta_excluded": excluded,
        "growth": p.mean_without("growth", "ratio_excluded"),
        "growth_excluded": excluded,
        "state_cosine": p.mean_without("state_cosine", "cosine_excluded"),
        "state_cosine_excluded": p.number("cosine_excluded"),
        "nonfinite_count": p.number("nonfinite_residual"),
    }


FAMILY: Family[PairContext] = Family(
    module=__name__,
    sums=tuple(
        Slot(name)
        for name in (
            "delta_norm",
            "relative_delta",
            "growth",
            "ratio_excluded",
            "state_cosine",
            "cosine_excluded",
            "nonfinite_residual",
        )
    ),
    partial=_partial,
    finish=_finish,
)

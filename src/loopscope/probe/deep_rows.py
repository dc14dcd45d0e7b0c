"""The routing of a deep probe → rows of probe_margin, probe_specialisation and probe_saturation."""

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.metrics.probe.null_margin import MIN_DOCUMENTS, NullRatio, cell_of, null_ratio
from loopscope.metrics.probe.specialisation import (
    coactivation,
    coactivation_shares,
    domain_share,
    saturation,
    vocabulary_chance,
    vocabulary_specialisation,
)
from loopscope.probe.deep_routing import Chosen, RoutingRecorder, Row, VisitRouting

_QUANTITIES = ("margin", "selection_gap")
_PAIRS_UP_TO = 64
"""E up to which a row lists every pair's count."""
_RATIO_COLUMNS = {
    "observed_mean": "observed",
    "null_median": "null_median",
    "rho": "rho",
    "rho_ref": "rho_ref",
    "rho_cal": "rho_cal",
    "rho_cal_low": "low",
    "rho_cal_high": "high",
}
"""Column → field of a NullRatio."""
_NO_REASON: Mapping[str, str] = MappingProxyType({})


def reasons(nulls: dict[str, str]) -> str | None:
    """The `null_reasons` column."""
    return json.dumps(nulls, separators=(",", ":"), sort_keys=True) if nulls else None


def with_null_reasons(values: Row, why: Mapping[str, str] = _NO_REASON) -> Row:
    """Columns with what is missing or not finite as null, and its reason.

    Args:
        values: the columns; None is missing.
        why: of a missing one; what it does not name is not applicable.
    """
    missing = {
        name: why.get(name, "not_applicable") if value is None else "nonfinite"
        for name, value in values.items()
        if value is None or (isinstance(value, float) and not math.isfinite(value))
    }
    return {**values, **dict.fromkeys(missing), "null_reasons": reasons(missing)}


def margin_rows(routing: RoutingRecorder, *, scope: str, num_shuffles: int, seed: int) -> list[Row]:
    """Two rows per visit with a router: margin and selection gap against their null."""
    rows = []
    for visit in routing:
        scores = visit.scores_DSE
        found = {
            quantity: null_ratio(
                scores,
                _int(visit, "top_k"),
                quantity,
                scope=scope,
                # One for each number: a visit's result does not depend on which others were measured.
                generator=torch.Generator().manual_seed(seed),
                num_shuffles=num_shuffles,
            )
            for quantity in _QUANTITIES
        }
        cell = cell_of(found["margin"], found["selection_gap"])
        why = _why(found, documents=scores.shape[0])
        rows += [
            {
                **visit.keys,
                "score_space": visit.score_space,
                "quantity": quantity,
                "shuffle_scope": scope,
                "num_shuffles": num_shuffles,
                "calibrated": not visit.bounded,
                "num_tokens": scores.shape[0] * scores.shape[1],
                **with_null_reasons({**_ratio(ratio), "cell": cell}, _NO_REASON if ratio is None else why),
            }
            for quantity, ratio in found.items()
        ]
    return rows


def _why(found: Mapping[str, NullRatio | None], documents: int) -> dict[str, str]:
    """Why an interval or a reading is missing where its ratio exists."""
    few = f"absent:fewer than {MIN_DOCUMENTS} documents"
    why = dict.fromkeys(("rho_cal_low", "rho_cal_high"), few)
    if None not in found.values():
        why["cell"] = few if documents < MIN_DOCUMENTS else "nonfinite"
    return why


def _ratio(ratio: NullRatio | None) -> Row:
    return {
        column: None if ratio is None else getattr(ratio, name) for column, name in _RATIO_COLUMNS.items()
    }


def specialisation_rows(
    routing: RoutingRecorder, ids_DS: NDArray[np.int64], domains: Sequence[str], *, seed: int
) -> list[Row]:
    """Per visit with a router: one row per domain, one for the vocabulary, one for co-activation."""
    rows = []
    for visit in routing:
        idx_DSK = visit.idx_DSK
        experts, top_k = _int(visit, "num_experts"), _int(visit, "top_k")
        keys: Row = {**visit.keys, "num_tokens": idx_DSK[..., 0].size}
        for domain, share_E in domain_share(idx_DSK, domains, experts).items():
            rows.append(
                {
                    **_kind(keys, "domain", domain, idx_DSK.shape[1] * domains.count(domain)),
                    "expert_share": [float(value) for value in share_E],
                    **with_null_reasons({"value": float(share_E.max()), "chance": top_k / experts}),
                }
            )
        rows.append(_vocabulary(keys, idx_DSK.reshape(-1, top_k), ids_DS.reshape(-1), experts, seed))
        rows.append(_coactivation(keys, idx_DSK.reshape(-1, top_k), experts, top_k))
    return rows


def _kind(keys: Row, kind: str, stratum: str, items: int) -> Row:
    return {**keys, "kind": kind, "stratum": stratum, "num_items": items}


def _vocabulary(
    keys: Row, idx_NK: NDArray[np.int64], ids_N: NDArray[np.int64], experts: int, seed: int
) -> Row:
    value, items = vocabulary_specialisation(idx_NK, ids_N, experts)
    row = _kind(keys, "vocabulary", "all", items)
    if not items:
        why = "absent:no token of the vocabulary occurs often enough"
        return {**row, "value": None, "chance": None, "null_reasons": reasons({"value": why, "chance": why})}
    chance = vocabulary_chance(idx_NK, ids_N, experts, np.random.default_rng(seed))
    return {**row, **with_null_reasons({"value": value, "chance": chance})}


def _coactivation(keys: Row, idx_NK: NDArray[np.int64], experts: int, top_k: int) -> Row:
    count_EE = coactivation(idx_NK, experts)
    share_P = coactivation_shares(count_EE)
    row = _kind(keys, "coactivation", "all", len(share_P))
    if experts <= _PAIRS_UP_TO:
        row["pair_count"] = [int(value) for value in count_EE[np.triu_indices(experts, 1)]]
    values = (
        (float(share_P.mean()), float(share_P.max()), (top_k - 1) / (experts - 1))
        if len(share_P)
        else [None] * 3
    )
    return {**row, **with_null_reasons(dict(zip(("value", "largest", "chance"), values, strict=True)))}


def saturation_rows(routing: RoutingRecorder, before: Chosen, from_step: int) -> list[Row]:
    """A row per visit that both probes saw over the same tokens."""
    rows = []
    for visit in routing:
        idx_DSK, other = visit.idx_DSK, before.get(_int(visit, "unrolled_pos"))
        if other is None or other.shape != idx_DSK.shape:
            continue
        top_k = _int(visit, "top_k")
        same_N = saturation(idx_DSK.reshape(-1, top_k), other.reshape(-1, top_k))
        rows.append(
            {
                **visit.keys,
                "num_tokens": len(same_N),
                "from_step": from_step,
                "saturation": float(same_N.mean()),
                "overlap_chance": top_k / _int(visit, "num_experts"),
                "null_reasons": None,
            }
        )
    return rows


def _int(visit: VisitRouting, name: str) -> int:
    return cast(int, visit.keys[name])

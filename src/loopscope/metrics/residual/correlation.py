"""Mean cosine between the tokens of a sequence: 1 when all are alike, about 0 for independent directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import NOT_APPLICABLE, Family, Metric, Slot, absent
from loopscope.metrics.partials import Partials
from loopscope.metrics.ratio import TINY

_SHARDED = absent("sequence is sharded over ranks")
_COLUMNS = ("token_correlation", "token_correlation_excluded", "token_correlation_pairs")


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    batch, seq = c.tensors.residual.shape[:2]
    excluded_N = c.norm_N < TINY
    counted_N = c.keep((~excluded_N).double())
    per_seq_B = counted_N.reshape(batch, seq).sum(1)
    return {
        "pair_cosine": (c.rows.unit_sum_BD.square().sum(1) - per_seq_B).sum(),
        "pairs": (per_seq_B * (per_seq_B - 1)).sum(),
        "correlation_excluded": c.total(excluded_N.float()),
    }


def _finish(p: Partials) -> Mapping[str, Any]:
    excluded = p.number("correlation_excluded")
    if p.sequence_sharded:
        return dict.fromkeys(_COLUMNS, _SHARDED)
    pairs = p.number("pairs")
    no_pair = NOT_APPLICABLE if p.tokens > 0 else np.nan
    value = p.number("pair_cosine") / pairs if pairs > 0 else no_pair
    return {
        "token_correlation": value,
        "token_correlation_excluded": excluded,
        "token_correlation_pairs": pairs,
    }


FAMILY: Family[VisitContext] = Family(
    metrics=(
        Metric(
            name="token_correlation",
            table="residual",
            kind="float64",
            formula="Σ_seq(‖Σ_t ĥ_t‖² − T_s) / Σ_seq T_s(T_s − 1), ĥ = h/‖h‖, not centred",
            unit="1",
            needs=("residual",),
            merge="Σ token_correlation·token_correlation_pairs / Σ token_correlation_pairs",
            source="mean cosine over pairs of distinct valid tokens of one sequence",
            null_rule="sharded sequence or no valid token: absent; no pair of tokens: not_applicable; "
            "non-finite residual: nonfinite",
        ),
        Metric(
            name="token_correlation_excluded",
            table="residual",
            kind="int64",
            formula="#{t : ‖h_t‖ < 1e-12}",
            unit="tokens",
            needs=("residual",),
            merge="sum",
            source="definition",
            null_rule="sharded sequence: absent; non-finite residual: nonfinite",
            empty_is_value=True,
        ),
        Metric(
            name="token_correlation_pairs",
            table="residual",
            kind="int64",
            formula="Σ_seq T_s(T_s − 1): ordered pairs behind token_correlation",
            unit="pairs",
            needs=("residual",),
            merge="sum",
            source="definition",
            null_rule="sharded sequence: absent; non-finite residual: nonfinite",
            empty_is_value=True,
        ),
    ),
    sums=(Slot("pair_cosine"), Slot("pairs"), Slot("correlation_excluded")),
    partial=_partial,
    finish=_finish,
)
"""Token correlation."""

"""`residual`: size and spread of a block's output."""

from functools import partial

from loopscope.catalog.gauge import Gauge
from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import RUN_KEYS, TOKEN_KEYS, VISIT_KEY, VISIT_KEYS

_norm = partial(
    Column,
    unit="activation",
    computed="norm",
    needs=("residual",),
    source="definition",
    null_rule="non-finite residual: nonfinite; no valid token: absent",
)
_correlation = partial(
    Column,
    type="int64",
    computed="correlation",
    needs=("residual",),
    merge="sum",
    undefined_for=("flat",),
    source="definition",
    null_rule="sharded sequence, or sequences that are not told apart: absent; non-finite residual: nonfinite",
    empty_is_value=True,
)

GAUGES = (
    Gauge(
        key="loop/token_corr_last",
        table="residual",
        column="token_correlation",
        how="last",
        where=(("block", "loop"),),
        place="unrolled_pos",
        headline=True,
    ),
)

TABLE = TableSpec(
    name="residual",
    doc="One row per traced step and visit: size and spread of the block's output h.",
    primary_key=VISIT_KEY,
    version=3,
    oldest=3,
    columns=(
        *RUN_KEYS,
        *VISIT_KEYS,
        *TOKEN_KEYS,
        _norm(name="norm_mean", formula="mean_t ‖h_t‖₂", merge="mean by num_tokens", shown=("diff",)),
        _norm(
            name="rms",
            formula="sqrt(mean over tokens and d of h²)",
            merge="root mean square by num_tokens",
            shown=("visits",),
        ),
        _norm(name="abs_max", formula="max |h|", merge="max"),
        _norm(
            name="nonfinite_count",
            type="int64",
            formula="non-finite entries of h",
            unit="entries",
            needs=(),
            requires=("residual",),
            merge="sum",
            null_rule="never; 0 where there is no valid token",
            empty_is_value=True,
        ),
        _correlation(
            name="token_correlation",
            type="float64",
            formula="Σ_seq(‖Σ_t ĥ_t‖² − T_s) / Σ_seq T_s(T_s − 1), ĥ = h/‖h‖, not centred",
            unit="1",
            merge="mean by token_correlation_pairs",
            source="mean cosine over pairs of distinct valid tokens of one sequence",
            null_rule="sharded sequence, sequences that are not told apart, or no valid token: absent; no pair of "
            "tokens: not_applicable; non-finite residual: nonfinite",
            empty_is_value=False,
            shown=("diff", "visits"),
        ),
        _correlation(name="token_correlation_excluded", formula="#{t : ‖h_t‖ < 1e-12}", unit="tokens"),
        _correlation(
            name="token_correlation_pairs",
            formula="Σ_seq T_s(T_s − 1): ordered pairs behind token_correlation",
            unit="pairs",
            since=2,
        ),
    ),
    gauges=GAUGES,
)

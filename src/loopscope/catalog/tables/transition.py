"""`transition`: how far the hidden state moves from one visit to another, and whether the choice repeats."""

from functools import partial

from loopscope.catalog.gauge import Gauge
from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import ROW_KEY, RUN_KEYS, TOKEN_KEYS

PAIR_KINDS = ("within_step", "step_boundary", "wrap", "from_input", "entry", "exit")
"""What relates the two visits of a row."""

_int = partial(Column, type="int32")
_BY_TOKEN = "mean by num_tokens"
_BAD = "non-finite residual: nonfinite"
_delta = partial(
    Column,
    unit="1",
    computed="delta",
    needs=("residual",),
    source="definition",
    null_rule=f"{_BAD}; no valid token: absent; all excluded: not_applicable",
)
_excluded = partial(_delta, type="int64", unit="tokens", merge="sum", null_rule=_BAD, empty_is_value=True)
_update = partial(
    Column,
    unit="1",
    computed="update",
    needs=("residual", "before_residual"),
    source="definition, D_r = h_r − h_{r−1} at one physical layer",
    null_rule="other kinds than step_boundary, the first step_boundary, every denominator below 1e-12: not_applicable; "
    f"{_BAD}",
)
_STRANGERS = "visits of different physical layers: not_applicable"
_overlap = partial(
    Column,
    unit="1",
    computed="overlap",
    needs=("topk_idx",),
    merge=_BY_TOKEN,
    undefined_for=("soft", "expert_choice", "variable_k", "drops"),
    source="definition; chance for two independent uniform k-subsets of E",
    null_rule=f"{_STRANGERS}; no set of k experts that ran for every token: absent; no valid token: absent",
)
_chance = partial(
    _overlap,
    needs=(),
    requires=("topk_idx",),
    merge="constant",
    null_rule=f"{_STRANGERS}; no set of k experts that ran for every token: absent",
    empty_is_value=True,
)

_BOUNDARY = (("kind", "step_boundary"),)
_gauge = partial(Gauge, table="transition", how="last", where=_BOUNDARY, place="to_pos")

GAUGES = (
    _gauge(
        key="loop/relative_delta_last",
        column="relative_delta",
        headline=True,
        title="Movement at the loop's end",
        text="How far the last pass moves the state, as a share of it.",
        axis="relative delta",
    ),
    _gauge(
        key="loop/growth_last",
        column="growth",
        headline=True,
        title="Growth at the loop's end",
        text="Norm of the state after the last pass over that before it.",
        axis="growth",
    ),
    _gauge(key="loop/state_cosine_last", column="state_cosine"),
    _gauge(key="loop/topk_overlap_last", column="topk_overlap"),
)

TABLE = TableSpec(
    name="transition",
    doc="One row per traced step and pair of visits: how far h moves, and whether the choice repeats.",
    primary_key=(*ROW_KEY, "kind", "from_pos", "to_pos"),
    version=2,
    oldest=2,
    columns=(
        *RUN_KEYS,
        Column(
            name="kind",
            type="string",
            formula=f"{', '.join(PAIR_KINDS[:-1])} or {PAIR_KINDS[-1]}",
            required=True,
        ),
        _int(name="from_pos", formula="unrolled_pos of the earlier visit", required=True),
        _int(name="to_pos", formula="unrolled_pos of the later visit", required=True),
        _int(name="from_loop_step", formula="loop_step of the earlier visit; null outside the loop"),
        _int(name="to_loop_step", formula="loop_step of the later visit; null outside the loop"),
        _int(name="from_layer_idx", formula="layer_idx of the earlier visit; null outside the loop"),
        _int(name="to_layer_idx", formula="layer_idx of the later visit; null outside the loop"),
        _int(name="num_loop_steps", formula="R really executed this step"),
        *TOKEN_KEYS,
        _delta(
            name="delta_norm_mean",
            formula="mean_t ‖D_t‖, D = h_to − h_from",
            unit="activation",
            merge=_BY_TOKEN,
        ),
        _delta(
            name="relative_delta",
            formula="mean_t ‖D_t‖/‖h_from,t‖",
            merge="mean by num_tokens less relative_delta_excluded",
            label="relative delta",
            shown=("summary", "diff", "visits", "spread"),
        ),
        _excluded(name="relative_delta_excluded", formula="#{t : ‖h_from,t‖ < 1e-12}"),
        _delta(
            name="growth",
            formula="mean_t ‖h_to,t‖/‖h_from,t‖",
            merge="mean by num_tokens less growth_excluded",
            shown=("summary", "diff", "visits"),
        ),
        _excluded(name="growth_excluded", formula="#{t : ‖h_from,t‖ < 1e-12}"),
        _delta(
            name="state_cosine",
            formula="mean_t cos(h_from,t, h_to,t)",
            merge="mean by num_tokens less state_cosine_excluded",
            shown=("summary", "diff"),
        ),
        _excluded(name="state_cosine_excluded", formula="#{t : ‖h_from,t‖·‖h_to,t‖ < 1e-12}"),
        _update(
            name="update_cosine",
            formula="mean_t cos(D_r,t, D_{r−1},t)",
            merge="mean by num_tokens less update_cosine_excluded",
        ),
        _update(
            name="update_cosine_excluded",
            type="int64",
            formula="#{t : ‖D_r,t‖·‖D_{r−1},t‖ < 1e-12}",
            unit="tokens",
            merge="sum",
        ),
        _update(
            name="acceleration",
            formula="mean_t ‖D_r,t − D_{r−1},t‖",
            unit="activation",
            merge=_BY_TOKEN,
        ),
        _update(
            name="contraction",
            formula="Σ_t ‖D_r,t‖ / Σ_t ‖D_{r−1},t‖",
            merge="from delta_norm_mean·num_tokens of this row and of the boundary before it",
        ),
        _delta(
            name="input_distance",
            formula="mean_t ‖h_r,t − loop input_t‖",
            unit="activation",
            computed="input_distance",
            merge=_BY_TOKEN,
            null_rule=f"other kinds than from_input: not_applicable; {_BAD}; no valid token: absent",
        ),
        _overlap(
            name="topk_overlap",
            formula="mean_t |S_a ∩ S_b| / k",
            label="top-k overlap",
            shown=("summary", "diff", "visits"),
        ),
        _overlap(name="topk_jaccard", formula="mean_t |S_a ∩ S_b| / |S_a ∪ S_b|"),
        _overlap(
            name="load_overlap",
            formula="Σ_e min(f_a,e, f_b,e)",
            merge="from expert_count of both visits",
            undefined_for=("soft",),
            null_rule=f"{_STRANGERS}; soft routing: absent; no valid token: absent",
        ),
        _chance(name="overlap_chance", formula="k/E", label="by chance", shown=("summary",)),
        _chance(name="jaccard_chance", formula="Σ_m Hypergeom(m; E, k, k)·m/(2k − m)"),
        _delta(
            name="nonfinite_count",
            type="int64",
            formula="non-finite entries of h_from and h_to",
            unit="entries",
            needs=(),
            requires=("residual",),
            merge="sum",
            null_rule="never; 0 where there is no valid token",
            empty_is_value=True,
        ),
    ),
    gauges=GAUGES,
    shown_rows=_BOUNDARY,
)

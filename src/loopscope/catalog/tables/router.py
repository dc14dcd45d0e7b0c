"""`router`: one row per traced step and visit of a layer with a router."""

from functools import partial

from loopscope.catalog.gauge import Gauge
from loopscope.catalog.table import Column, Picture, TableSpec
from loopscope.catalog.tables.keys import (
    BY_TOKEN,
    NO_TOKEN,
    RUN_KEYS,
    SWITCH,
    TOKEN_KEYS,
    VISIT_KEY,
    VISIT_KEYS,
)
from loopscope.catalog.tables.router_scores import SCORES

_MAXVIO = "MaxVio of Wang et al. 2024, arXiv 2408.15664"

_load = partial(
    Column,
    unit="1",
    needs=("topk_idx",),
    merge="from expert_count",
    undefined_for=("soft",),
    null_rule=f"soft routing: absent; {NO_TOKEN}",
)
_entropy_of_load = partial(_load, computed="load", source=f"Shannon 1948; f_e as in {SWITCH}")
_violation = partial(_load, computed="violation", source=_MAXVIO)
_mass = partial(
    Column,
    unit="1",
    computed="mass",
    needs=("topk_idx", "topk_weights"),
    source=f"{_MAXVIO}, on combine weights instead of counts",
)
_dead = partial(_load, computed="dead", unit="experts")

LOAD = (
    _load(
        name="expert_count",
        type="list<int64>",
        formula="c_e = #{t : e in S_t}",
        unit="assignments",
        computed="load",
        merge="sum",
        source=f"{SWITCH}, eq. 5",
        null_rule="soft routing: absent; zeros where there is no valid token",
        empty_is_value=True,
    ),
    _mass(
        name="expert_mass",
        type="list<float32>",
        formula="m_e = Σ_t w_te",
        unit="tokens",
        merge="sum",
        null_rule="non-finite weight: nonfinite; zeros where there is no valid token",
        empty_is_value=True,
    ),
    _entropy_of_load(
        name="load_entropy_ratio",
        formula="H(f)/ln E",
        null_rule=f"E = 1: not_applicable; {NO_TOKEN}",
        label="load H",
        shown=("summary", "worst", "diff", "visits", "spread", "probe_diff"),
        picture=Picture(
            id="load_entropy",
            title="Evenness of the load",
            text="1: every expert gets its share; 0: one expert gets everything.",
            side="smallest",
            least=0.8,
            most=1.0,
        ),
    ),
    _entropy_of_load(name="effective_experts", formula="exp(H(f))", unit="experts"),
    _entropy_of_load(name="load_kl_uniform", formula="ln E − H(f)", unit="nats"),
    _entropy_of_load(name="load_cv", formula="std(c)/mean(c), ddof 0"),
    _violation(
        name="maxvio_count",
        formula="max_e u_e − 1",
        label="MaxVio",
        shown=("summary", "worst", "diff", "visits", "spread", "probe_diff"),
        picture=Picture(
            id="maxvio",
            title="Overload of the busiest expert",
            text="0: balanced; 1: it gets twice its share. Its maximum, E/k − 1, may differ between head, loop and "
            "tail.",
            side="largest",
            least=0.0,
            most=1.0,
        ),
    ),
    _violation(name="minvio_count", formula="min_e u_e − 1"),
    _violation(name="avgvio_count", formula="mean_e |u_e − 1|"),
    _violation(
        name="maxvio_micro_mean",
        formula="token-weighted mean of max u − 1 over microbatch × rank",
        merge=BY_TOKEN,
        one_batch="maxvio_count",
    ),
    _violation(
        name="maxvio_rank_max",
        formula="the largest rank's max u − 1",
        merge="max",
        one_batch="maxvio_count",
    ),
    _mass(
        name="maxvio_mass",
        formula="max_e E·m_e/Σm − 1",
        merge="from expert_mass",
        null_rule=f"non-finite weight: nonfinite; no weight above 0: not_applicable; {NO_TOKEN}",
    ),
    _mass(
        name="mass_to_count_ratio",
        formula="maxvio_mass / maxvio_count",
        merge="from expert_mass, expert_count",
        undefined_for=("soft",),
        null_rule="maxvio_count < 1e-6 or no weight above 0: not_applicable; soft routing: absent; non-finite weight: "
        f"nonfinite; {NO_TOKEN}",
    ),
    _dead(
        name="dead_experts",
        type="int64",
        formula="#{e : c_e = 0}",
        source=SWITCH,
        label="dead",
        shown=("summary", "worst", "diff", "visits"),
        picture=Picture(
            id="dead",
            title="Experts without a token",
            text="Counted within one traced step.",
            side="largest",
            least=0.0,
            most=1.0,
        ),
    ),
    _dead(
        name="dead_expected",
        formula="E·(1 − k/E)^T",
        needs=(),
        requires=("topk_idx",),
        merge="from num_tokens",
        undefined_for=("soft", "expert_choice", "variable_k"),
        null_rule=f"soft routing, experts that choose, a number of experts that varies: absent; {NO_TOKEN}",
        source="expected number of empty experts when every token draws k of E uniformly",
    ),
    _dead(
        name="dropped_assignments",
        type="int64",
        formula="assignments that found no capacity",
        unit="assignments",
        requires=("topk_idx", "dropped_assignments"),
        merge="sum",
        undefined_for=("soft", "expert_choice"),
        source=SWITCH,
        null_rule="not_applicable where the router drops nothing; soft routing, experts that choose: absent",
        empty_is_value=True,
    ),
)

KEYS = (
    *RUN_KEYS,
    *VISIT_KEYS,
    Column(
        name="score_space",
        type="string",
        formula="the scores behind margin and gap: logits or selection_scores",
    ),
    *TOKEN_KEYS,
)

_gauge = partial(Gauge, table="router", headline=True)

GAUGES = (
    _gauge(
        key="moe/maxvio_max",
        column="maxvio_count",
        how="max",
        title="Most overloaded expert",
        text="MaxVio of the visit where it is largest; 0: balanced, 1: twice its share.",
        axis="MaxVio",
    ),
    _gauge(key="moe/maxvio_pos", column="maxvio_count", how="place of max", place="unrolled_pos"),
    _gauge(
        key="moe/dead",
        column="dead_experts",
        how="sum",
        title="Experts without a token",
        text="Within one traced step, all visits together.",
        axis="experts",
    ),
    _gauge(
        key="moe/load_entropy_min",
        column="load_entropy_ratio",
        how="min",
        title="Least even visit",
        text="Load entropy of the visit where it is lowest; 1: every expert gets its share.",
        axis="ratio",
    ),
    _gauge(key="moe/token_entropy_min", column="token_entropy_ratio", how="min", headline=False),
    _gauge(key="moe/margin_min", column="margin_mean", how="min", headline=False),
    _gauge(key="moe/z_mean", column="z_mean", how="mean"),
    _gauge(key="moe/logit_abs_max", column="logit_abs_max", how="max"),
)

TABLE = TableSpec(
    name="router",
    doc="One row per traced step and visit of a layer with a router (training tokens).",
    primary_key=VISIT_KEY,
    version=4,
    oldest=3,
    columns=(*KEYS, *LOAD, *SCORES),
    gauges=GAUGES,
)

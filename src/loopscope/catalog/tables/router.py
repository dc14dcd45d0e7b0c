"""`router`: one row per traced step and visit of a layer with a router."""

from __future__ import annotations

from functools import partial

from loopscope.catalog.gauge import Gauge
from loopscope.catalog.table import Column, Picture, TableSpec
from loopscope.catalog.tables.keys import RUN_KEYS, TOKEN_KEYS, VISIT_KEY, VISIT_KEYS

_SWITCH = "Fedus et al. 2021, arXiv 2101.03961"
_MAXVIO = "MaxVio of Wang et al. 2024, arXiv 2408.15664"
_NO_TOKEN = "no valid token: absent"
_BY_TOKEN = "mean by num_tokens"
_NEVER = "never; 0 where there is no valid token"

_load = partial(
    Column,
    unit="1",
    needs=("topk_idx",),
    merge="from expert_count",
    null_rule=_NO_TOKEN,
)
_entropy_of_load = partial(_load, computed="load", source=f"Shannon 1948; f_e as in {_SWITCH}")
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
        source=f"{_SWITCH}, eq. 5",
        null_rule="never; zeros where there is no valid token",
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
        null_rule=f"E = 1: not_applicable; {_NO_TOKEN}",
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
        merge=_BY_TOKEN,
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
        null_rule=f"non-finite weight: nonfinite; no weight above 0: not_applicable; {_NO_TOKEN}",
    ),
    _mass(
        name="mass_to_count_ratio",
        formula="maxvio_mass / maxvio_count",
        merge="from expert_mass, expert_count",
        null_rule="maxvio_count < 1e-6 or no weight above 0: not_applicable; non-finite weight: nonfinite; "
        f"{_NO_TOKEN}",
    ),
    _dead(
        name="dead_experts",
        type="int64",
        formula="#{e : c_e = 0}",
        source=_SWITCH,
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
        source="expected number of empty experts when every token draws k of E uniformly",
    ),
    _dead(
        name="dropped_assignments",
        type="int64",
        formula="assignments that found no capacity",
        unit="assignments",
        requires=("topk_idx", "dropped_assignments"),
        merge="sum",
        source=_SWITCH,
        null_rule="not_applicable where the router drops nothing",
    ),
)

_BAD_PROB = f"non-finite probability: nonfinite; {_NO_TOKEN}"
_BAD_SCORE = f"non-finite score: nonfinite; {_NO_TOKEN}"
_balance = partial(
    Column,
    unit="1",
    computed="balance",
    needs=("topk_idx", "router_probs"),
    source=f"{_SWITCH}, eq. 4-6 (transformers' value is k times this)",
    null_rule=_BAD_PROB,
)
_entropy = partial(
    Column,
    unit="nats",
    computed="entropy",
    needs=("router_probs",),
    merge=_BY_TOKEN,
    source="Shannon 1948",
    null_rule=_BAD_PROB,
)
_concentration = partial(
    Column, unit="1", computed="concentration", merge=_BY_TOKEN, source="definition", null_rule=_BAD_PROB
)
_effective_topk = partial(
    Column,
    unit="experts",
    computed="effective_topk",
    needs=("topk_weights",),
    source="participation ratio, the Hill number of order 2 (Hill 1973) of the combine weights",
    since=4,
)
_choice = partial(
    Column,
    unit="score",
    needs=("choice_scores",),
    source="definition; r = selection_scores where given, else raw logits (score_space says which)",
)
_margin = partial(
    _choice, computed="margin", merge="from margin_hist", null_rule=f"k = 1: not_applicable; {_BAD_SCORE}"
)
_gap = partial(
    _choice,
    computed="margin",
    merge=_BY_TOKEN,
    null_rule=f"k = E: not_applicable; {_BAD_SCORE}",
)
_z = partial(
    Column,
    unit="nats",
    computed="z",
    needs=("router_logits",),
    merge=_BY_TOKEN,
    source="router z-loss of Zoph et al. 2022, arXiv 2202.08906, eq. 5",
    null_rule=f"sigmoid router: not_applicable; non-finite logit: nonfinite; {_NO_TOKEN}",
)
_logits = partial(
    Column,
    unit="logit",
    computed="logits",
    needs=("router_logits",),
    source="definition",
    null_rule=f"non-finite logit: nonfinite; {_NO_TOKEN}",
)
_bias = partial(
    Column,
    computed="bias",
    source="loss-free balancing of Wang et al. 2024, arXiv 2408.15664",
    null_rule="no bias or no valid token: absent; non-finite bias or score: nonfinite",
)

SCORES = (
    _balance(
        name="mean_prob",
        type="list<float32>",
        formula="P_e = mean_t p_te",
        needs=("router_probs",),
        merge=_BY_TOKEN,
    ),
    _balance(
        name="lb_loss",
        formula="E·Σ_e f_e·P_e from merged f and P; 1 when balanced",
        merge="from expert_count, mean_prob",
    ),
    _balance(
        name="lb_loss_micro_mean",
        formula="equal-weight mean of each microbatch × rank's own E·Σ_e f_e·P_e",
        merge="mean by filled_microbatches",
        one_batch="lb_loss",
    ),
    _balance(
        name="filled_microbatches",
        type="int64",
        formula="microbatches × ranks with a valid token: what lb_loss_micro_mean is a mean over",
        unit="microbatches",
        needs=(),
        requires=("topk_idx",),
        merge="sum",
        source="definition",
        null_rule=_NEVER,
        empty_is_value=True,
        since=2,
    ),
    _entropy(name="token_entropy_mean", formula="mean_t H(p_t)", shown=("probe_diff",)),
    _entropy(
        name="token_entropy_ratio",
        formula="mean_t H(p_t) / ln E",
        unit="1",
        null_rule=f"E = 1: not_applicable; {_BAD_PROB}",
        label="token H",
        shown=("summary", "diff", "visits"),
        picture=Picture(
            id="token_entropy",
            title="Indecision per token",
            text="1: a token's probabilities are even; near 0: the router is sure. Low is normal in a specialised "
            "router.",
            least=0.0,
            most=1.0,
        ),
    ),
    _entropy(
        name="mutual_information",
        formula="H(P) − mean_t H(p_t)",
        merge="from mean_prob, token_entropy_mean",
        shown=("visits",),
    ),
    _concentration(name="top1_prob_mean", formula="mean_t max_e p_te", needs=("router_probs",)),
    _concentration(
        name="topk_mass_mean", formula="mean_t Σ_{e in S_t} p_te", needs=("router_probs", "topk_idx")
    ),
    _effective_topk(
        name="effective_topk_mean",
        formula="mean_t (Σ_k w_tk)² / Σ_k w_tk²: chosen experts that count, 1 (one has all the weight) to k",
        merge="mean by num_tokens less effective_topk_excluded",
        null_rule="k = 1, or all excluded: not_applicable; non-finite weight: nonfinite; no valid token: absent",
        label="effective k",
        picture=Picture(
            id="effective_topk",
            title="Chosen experts that count",
            text="k: a token's experts share its weight evenly; 1: one of them has it all, and the others are computed "
            "for nothing.",
            least=1.0,
        ),
    ),
    _effective_topk(
        name="effective_topk_excluded",
        type="int64",
        formula="#{t : Σ_k w_tk² < 1e-12}",
        unit="tokens",
        merge="sum",
        null_rule="k = 1: not_applicable; non-finite weight: nonfinite",
        empty_is_value=True,
    ),
    _margin(
        name="margin_mean",
        formula="mean_t (r_(1) − r_(k))",
        merge=_BY_TOKEN,
        label="margin",
        shown=("summary", "visits", "probe_diff"),
    ),
    _margin(name="margin_min", formula="min_t (r_(1) − r_(k))", merge="min"),
    _margin(
        name="margin_hist",
        type="list<int64>",
        formula="tokens per half-octave bin of r_(1) − r_(k)",
        unit="tokens",
        merge="sum",
    ),
    _margin(name="margin_p25", formula="25% quantile from margin_hist, error within one bin"),
    _margin(
        name="margin_p50",
        formula="median from margin_hist, error within one bin",
        shown=("diff",),
        picture=Picture(
            id="margin",
            title="Margin of the choice (median)",
            text="Distance from the best to the last chosen expert's score. Near 0 the choice is arbitrary.",
            least=0.0,
        ),
    ),
    _margin(name="margin_p75", formula="75% quantile from margin_hist, error within one bin"),
    _gap(name="selection_gap_mean", formula="mean_t (r_(k) − r_(k+1))", shown=("probe_diff",)),
    _gap(name="selection_gap_min", formula="min_t (r_(k) − r_(k+1))", merge="min"),
    _gap(
        name="selection_gap_hist",
        type="list<int64>",
        formula="tokens per half-octave bin of r_(k) − r_(k+1)",
        unit="tokens",
        merge="sum",
    ),
    _gap(
        name="selection_gap_p01",
        formula="1% quantile from selection_gap_hist, error within one bin",
        merge="from selection_gap_hist",
    ),
    _z(
        name="z_mean",
        formula="mean_t z_t, z_t = logsumexp_e logits",
        label="z",
        shown=("summary", "diff", "visits"),
        picture=Picture(
            id="z",
            title="Size of the router's logits (mean logsumexp)",
            text="Balanced small logits give about ln E; towards ln E + 10, or far below 0, they drift.",
        ),
    ),
    _z(name="z_std", formula="std_t z_t, ddof 0", merge="from z_mean, z_sq_mean"),
    _z(name="z_min", formula="min_t z_t", merge="min"),
    _z(name="z_max", formula="max_t z_t", merge="max"),
    _z(name="z_sq_mean", formula="mean_t z_t²: the visit's z-loss", unit="nats²"),
    _z(
        name="z_frac_negative",
        formula="share of tokens with z_t < 0, where the z-loss sharpens the router",
        unit="1",
    ),
    _logits(
        name="logit_rms",
        formula="sqrt(mean over tokens and experts of logit²)",
        merge="root mean square by num_tokens",
    ),
    _logits(name="logit_abs_max", formula="max |logit|", merge="max", shown=("diff", "visits")),
    _logits(
        name="nonfinite_count",
        type="int64",
        formula="non-finite logits; in tokens whose logits are finite, non-finite probabilities, weights and selection "
        "scores",
        unit="entries",
        needs=(),
        requires=("router_logits",),
        merge="sum",
        null_rule=_NEVER,
        empty_is_value=True,
    ),
    _bias(
        name="expert_bias",
        type="list<float32>",
        formula="the bias b_e",
        unit="score",
        requires=("expert_bias",),
        merge="last",
    ),
    _bias(
        name="bias_jaccard",
        formula="mean_t |S_t ∩ S'_t| / |S_t ∪ S'_t|, S' the choice without the bias",
        unit="1",
        needs=("choice_scores", "topk_idx"),
        requires=("choice_scores", "topk_idx", "expert_bias"),
        merge=_BY_TOKEN,
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

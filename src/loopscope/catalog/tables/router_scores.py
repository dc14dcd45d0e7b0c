"""The columns of `router` about scores: probabilities, entropies, margins, logits, bias."""

from functools import partial

from loopscope.catalog.table import Column, Picture
from loopscope.catalog.tables.keys import BY_TOKEN, NO_TOKEN, SWITCH

_BAD_PROB = f"non-finite probability: nonfinite; {NO_TOKEN}"
_BAD_SCORE = f"non-finite score: nonfinite; {NO_TOKEN}"
_UNRANKED = ("soft", "expert_choice", "variable_k", "unranked", "null_experts")
_balance = partial(
    Column,
    unit="1",
    computed="balance",
    needs=("topk_idx", "router_probs"),
    undefined_for=("soft", "expert_choice", "drops", "null_experts"),
    source=f"{SWITCH}, eq. 4-6 (transformers' value is k times this)",
    null_rule=f"soft routing, experts that choose or compute nothing, dropped assignments: absent; {_BAD_PROB}",
)
_entropy = partial(
    Column,
    unit="nats",
    computed="entropy",
    needs=("router_probs",),
    merge=BY_TOKEN,
    undefined_for=("null_experts",),
    source="Shannon 1948",
    null_rule=f"experts that compute nothing: absent; {_BAD_PROB}",
)
_concentration = partial(
    Column, unit="1", computed="concentration", merge=BY_TOKEN, source="definition", null_rule=_BAD_PROB
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
    undefined_for=_UNRANKED,
    source="definition; r = selection_scores where given, else raw logits (score_space says which)",
)
_margin = partial(
    _choice,
    computed="margin",
    merge="from margin_hist",
    null_rule=f"k = 1: not_applicable; the choice is no top-k of a fixed k: absent; {_BAD_SCORE}",
)
_gap = partial(
    _choice,
    computed="margin",
    merge=BY_TOKEN,
    undefined_for=(*_UNRANKED, "no_alternative"),
    null_rule="k = E: not_applicable; the choice is no top-k of a fixed k, or groups leave no other expert: absent; "
    f"{_BAD_SCORE}",
)
_z = partial(
    Column,
    unit="nats",
    computed="z",
    needs=("router_logits",),
    merge=BY_TOKEN,
    undefined_for=("null_experts",),
    source="router z-loss of Zoph et al. 2022, arXiv 2202.08906, eq. 5",
    null_rule="another score function than softmax: not_applicable; experts that compute nothing: absent; non-finite "
    f"logit: nonfinite; {NO_TOKEN}",
)
_logits = partial(
    Column,
    unit="logit",
    computed="logits",
    needs=("router_logits",),
    source="definition",
    null_rule=f"non-finite logit: nonfinite; {NO_TOKEN}",
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
        merge=BY_TOKEN,
        undefined_for=(),
        null_rule=_BAD_PROB,
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
        undefined_for=(),
        source="definition",
        null_rule="never; 0 where there is no valid token",
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
    _concentration(
        name="top1_prob_mean",
        formula="mean_t max_e p_te",
        needs=("router_probs",),
        undefined_for=("null_experts",),
        null_rule=f"experts that compute nothing: absent; {_BAD_PROB}",
    ),
    _concentration(
        name="topk_mass_mean",
        formula="mean_t Σ_{e in S_t} p_te",
        needs=("router_probs", "topk_idx"),
        undefined_for=("soft",),
        null_rule=f"soft routing: absent; {_BAD_PROB}",
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
        merge=BY_TOKEN,
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
        null_rule="never; 0 where there is no valid token",
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
        merge=BY_TOKEN,
        undefined_for=(*_UNRANKED, "drops", "grouped"),
        null_rule="no bias or no valid token: absent; the choice is no top-k over all experts of a fixed k, or not all "
        "of it ran: absent; non-finite bias or score: nonfinite",
    ),
)

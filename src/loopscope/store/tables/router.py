"""`router` and `probe_router`: one row per traced step and visit of a layer with a router."""

from __future__ import annotations

from loopscope.store.schema import Column, TableSchema
from loopscope.store.tables.keys import RUN_KEYS, TOKEN_KEYS, VISIT_KEY, VISIT_KEYS, counts, floats

_LOAD = (
    Column("expert_count", "list<int64>", "c_e: assignments per expert"),
    Column("expert_mass", "list<float32>", "m_e: combine weight per expert"),
    *floats("load_entropy_ratio", "H(f)/ln E"),
    *floats("effective_experts", "exp H(f)"),
    *floats("load_kl_uniform", "ln E − H(f)"),
    *floats("load_cv", "std(c)/mean(c)"),
    *floats("maxvio_count", "max u − 1, u = E·f"),
    *floats("minvio_count", "min u − 1"),
    *floats("avgvio_count", "mean |u − 1|"),
    *floats("maxvio_micro_mean", "token-weighted mean of maxvio_count over microbatches and ranks"),
    *floats("maxvio_rank_max", "largest rank's maxvio_count"),
    *floats("maxvio_mass", "max − 1 over E·m_e/Σm"),
    *floats("mass_to_count_ratio", "maxvio_mass/maxvio_count; null where maxvio_count is below 1e-6"),
    *counts("dead_experts", "experts without an assignment"),
    *floats("dead_expected", "E(1 − k/E)^T: dead experts under balance"),
    *counts("dropped_assignments", "assignments over capacity; null where routing drops none"),
)

_SCORES = (
    Column("mean_prob", "list<float32>", "P_e: mean probability per expert"),
    *floats("lb_loss", "E·Σ f_e·P_e from merged f and P; 1 when balanced"),
    *floats("lb_loss_micro_mean", "mean of each microbatch's and rank's own lb_loss, equal weights"),
    *floats("token_entropy_mean", "mean_t H(p_t), nats"),
    *floats("token_entropy_ratio", "token_entropy_mean/ln E"),
    *floats("mutual_information", "H(P) − mean_t H(p_t), nats"),
    *floats("top1_prob_mean", "mean_t max p"),
    *floats("topk_mass_mean", "mean_t Σ of p over the chosen experts"),
    *floats("margin_mean margin_min", "r_(1) − r_(k) per token; null at k = 1"),
    Column("margin_hist", "list<int64>", "histogram of the margin over fixed edges"),
    *floats("margin_p25 margin_p50 margin_p75", "quantile of the margin, from the histogram"),
    *floats("selection_gap_mean selection_gap_min", "r_(k) − r_(k+1) per token; null at k = E"),
    Column("selection_gap_hist", "list<int64>", "histogram of the selection gap over fixed edges"),
    *floats("selection_gap_p01", "quantile of the selection gap, from the histogram"),
    *floats("z_mean z_std z_min z_max", "logsumexp of a token's logits, reduced"),
    *floats("z_sq_mean", "mean squared logsumexp: the visit's z-loss"),
    *floats("z_frac_negative", "share of tokens whose logsumexp is negative"),
    *floats("logit_rms logit_abs_max", "size of the logits"),
    *counts("nonfinite_count", "non-finite values among the valid tokens' router tensors"),
    Column("expert_bias", "list<float32>", "bias added to the scores"),
    *floats("bias_jaccard", "overlap of the choice with and without the bias"),
)

_LATER = counts(
    "filled_microbatches",
    "microbatches × ranks with a valid token: what lb_loss_micro_mean is a mean over",
    since=2,
)

_KEYS = (
    *RUN_KEYS,
    *VISIT_KEYS,
    Column("score_space", "string", "the scores behind margin and gap: logits or selection_scores"),
    *TOKEN_KEYS,
)

ROUTER = TableSchema(
    name="router",
    doc="One row per traced step and visit of a layer with a router (training tokens).",
    primary_key=VISIT_KEY,
    version=2,
    columns=(*_KEYS, *_LOAD, *_SCORES, *_LATER),
)

CORPUS = (
    Column("corpus_name", "string", "name of the probe corpus"),
    Column("corpus_hash", "string", "SHA-256 over the corpus's tokens", required=True),
    Column("first_token_dropped", "bool", "the tokenizer's marker before every document was dropped"),
)

PROBE_ROUTER = TableSchema(
    name="probe_router",
    doc="The router columns over a fixed probe corpus; one row per probe step and visit.",
    primary_key=(*VISIT_KEY, "corpus_hash"),
    version=2,
    columns=(*_KEYS, *CORPUS, *_LOAD, *_SCORES, *_LATER),
)

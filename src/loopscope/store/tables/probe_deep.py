"""What a deep probe gives: readouts, margins against a null, perturbations, specialisation, saturation."""

from __future__ import annotations

from loopscope.store.schema import Column, TableSchema
from loopscope.store.tables.keys import ROW_KEY, RUN_KEYS, VISIT_KEY, VISIT_KEYS, counts, floats
from loopscope.store.tables.router import CORPUS

_VISIT = (
    *RUN_KEYS,
    *VISIT_KEYS,
    *CORPUS,
    Column("num_tokens", "int64", "tokens of the corpus"),
)

PROBE_READOUT = TableSchema(
    name="probe_readout",
    doc="One row per probe step and loop step: what the model would predict if the loop ended there.",
    primary_key=(*ROW_KEY, "corpus_hash", "readout", "loop_step"),
    columns=(
        *RUN_KEYS,
        *CORPUS,
        Column(
            "readout",
            "string",
            "tail: through the tail layers; head: straight to norm and head",
            required=True,
        ),
        Column("loop_step", "int32", "the pass after which is read out", required=True),
        Column("num_loop_steps", "int32", "R really executed"),
        Column("num_tokens", "int64", "tokens of the corpus"),
        Column("num_target_tokens", "int64", "tokens with a target"),
        *floats("loss_mean", "loss_sum/num_target_tokens, nats per token"),
        *floats("loss_sum", "summed cross-entropy, nats"),
        *floats("kl_from_previous", "mean_t KL(q_{r−1} ‖ q_r), nats"),
        *floats("entropy_mean", "mean_t H(q_r), nats"),
        *floats("entropy_change", "entropy_mean less that of the step before, nats"),
        *floats("argmax_settled", "share of tokens whose arg-max equals that of every later step"),
    ),
)

PROBE_MARGIN = TableSchema(
    name="probe_margin",
    doc="One row per probe step, visit and quantity: the margin or selection gap against shuffled scores.",
    primary_key=(*VISIT_KEY, "corpus_hash", "quantity", "shuffle_scope"),
    columns=(
        *_VISIT,
        Column("score_space", "string", "the scores: logits or selection_scores"),
        Column("quantity", "string", "margin: r_(1) − r_(k); selection_gap: r_(k) − r_(k+1)", required=True),
        Column("shuffle_scope", "string", "batch or document: where a column is permuted", required=True),
        Column("num_shuffles", "int32", "shuffles behind the median"),
        Column("calibrated", "bool", "false for bounded scores, whose rho_cal lies outside 1 by nature"),
        *floats("observed_mean", "mean_t of the quantity"),
        *floats("null_median", "median over shuffles of the mean"),
        *floats("rho", "observed_mean/null_median"),
        *floats("rho_ref", "rho of a surrogate without structure"),
        *floats("rho_cal", "rho/rho_ref; 1 without structure"),
        *floats("rho_cal_low rho_cal_high", "95% interval of rho_cal, documents resampled"),
        Column("cell", "string", "under-specialised, block, hierarchical or strong; of both quantities"),
    ),
)

PROBE_PERTURBATION = TableSchema(
    name="probe_perturbation",
    doc="One row per probe step and loop visit: how a disturbance of the loop's input has grown there.",
    primary_key=(*VISIT_KEY, "corpus_hash"),
    columns=(
        *_VISIT,
        *floats("epsilon", "length of the disturbance of a token, as a share of ‖h_t‖"),
        Column("num_directions", "int32", "random directions that are averaged"),
        *floats("relative_distance", "‖h′ − h‖_F/‖h‖_F, mean over directions"),
        *floats("relative_distance_min relative_distance_max", "smallest and largest direction's"),
        *floats("amplification", "‖h′ − h‖_F over that of the injected disturbance, mean over directions"),
        *floats("flipped_share", "share of tokens whose set of experts changed, mean over directions"),
        *floats("distance_rate", "factor per pass of ‖h′ − h‖_F at this layer, geometric mean up to here"),
        *floats("relative_rate", "factor per pass of relative_distance at this layer, up to here"),
    ),
)

PROBE_SPECIALISATION = TableSchema(
    name="probe_specialisation",
    doc="One row per probe step, visit and kind: what experts are chosen for.",
    primary_key=(*VISIT_KEY, "corpus_hash", "kind", "stratum"),
    columns=(
        *_VISIT,
        Column("kind", "string", "domain, vocabulary or coactivation", required=True),
        Column("stratum", "string", "the domain's name; all for the other kinds", required=True),
        *floats(
            "value",
            "domain: max_e N_{e,D}/N_D; vocabulary: mean_x max_e N_{e,x}/N_x; coactivation: mean N_ij/N_i over pairs",
        ),
        *floats("chance", "the same where choices and tokens are matched at random, or choices are uniform"),
        *floats("largest", "coactivation: the largest pair's N_ij/N_i"),
        *counts("num_items", "tokens of the domain, tokens of the vocabulary, or pairs of experts"),
        Column("expert_share", "list<float64>", "domain: N_{e,D}/N_D per expert"),
        Column("pair_count", "list<int64>", "coactivation: N_ij for i < j row by row, up to E = 64"),
    ),
)

PROBE_SATURATION = TableSchema(
    name="probe_saturation",
    doc="One row per probe step, visit and earlier probe: how much of each token's choice stayed the same.",
    primary_key=(*VISIT_KEY, "corpus_hash", "from_step"),
    columns=(
        *_VISIT,
        Column("from_step", "int64", "step of the earlier parameters", required=True),
        *floats("saturation", "mean_t |S ∩ S′|/k"),
        *floats("overlap_chance", "k/E: saturation of independent choices"),
    ),
)

DEEP = (PROBE_READOUT, PROBE_MARGIN, PROBE_PERTURBATION, PROBE_SPECIALISATION, PROBE_SATURATION)
"""Tables of the deep probe, which has a period of its own."""

"""`residual` and `transition`: the hidden state per visit, and per pair of visits."""

from __future__ import annotations

from loopscope.store.schema import Column, TableSchema
from loopscope.store.tables.keys import (
    ROW_KEY,
    RUN_KEYS,
    TOKEN_KEYS,
    VISIT_KEY,
    VISIT_KEYS,
    counts,
    floats,
)

RESIDUAL = TableSchema(
    name="residual",
    doc="One row per traced step and visit: size and spread of the block's output h.",
    primary_key=VISIT_KEY,
    version=2,
    columns=(
        *RUN_KEYS,
        *VISIT_KEYS,
        *TOKEN_KEYS,
        *floats("norm_mean", "mean_t ‖h_t‖₂"),
        *floats("rms", "root mean square of h's entries"),
        *floats("abs_max", "largest |entry| of h"),
        *floats("token_correlation", "mean cosine over pairs of distinct valid tokens of one sequence"),
        *counts("token_correlation_excluded", "tokens left out because |h| is below 1e-12"),
        *counts("nonfinite_count", "non-finite entries of h among the valid tokens"),
        *counts("token_correlation_pairs", "ordered pairs of tokens behind token_correlation", since=2),
    ),
)

TRANSITION = TableSchema(
    name="transition",
    doc="One row per traced step and pair of visits: how far h moves, and whether the choice repeats.",
    primary_key=(*ROW_KEY, "kind", "from_pos", "to_pos"),
    columns=(
        *RUN_KEYS,
        Column(
            "kind", "string", "within_step, step_boundary, wrap, from_input, entry or exit", required=True
        ),
        Column("from_pos", "int32", "unrolled_pos of the earlier visit", required=True),
        Column("to_pos", "int32", "unrolled_pos of the later visit", required=True),
        Column("from_loop_step", "int32", "loop_step of the earlier visit; null outside the loop"),
        Column("to_loop_step", "int32", "loop_step of the later visit; null outside the loop"),
        Column("from_layer_idx", "int32", "layer_idx of the earlier visit; null outside the loop"),
        Column("to_layer_idx", "int32", "layer_idx of the later visit; null outside the loop"),
        Column("num_loop_steps", "int32", "R really executed this step"),
        *TOKEN_KEYS,
        *floats("delta_norm_mean", "mean_t ‖h_to − h_from‖"),
        *floats("relative_delta", "mean_t ‖h_to − h_from‖/‖h_from‖"),
        *floats("growth", "mean_t ‖h_to‖/‖h_from‖"),
        *floats("state_cosine", "mean_t cos(h_from, h_to)"),
        *floats("update_cosine", "mean_t cos(D_r, D_{r−1}), D_r = h_r − h_{r−1} at one layer"),
        *floats("acceleration", "mean_t ‖D_r − D_{r−1}‖"),
        *floats("contraction", "Σ_t ‖D_r‖/Σ_t ‖D_{r−1}‖"),
        *floats("input_distance", "mean_t ‖h_r − loop input‖"),
        *floats("topk_overlap", "mean_t |S_a ∩ S_b|/k; same physical layer only"),
        *floats("topk_jaccard", "mean_t |S_a ∩ S_b|/|S_a ∪ S_b|; same physical layer only"),
        *floats("load_overlap", "Σ_e min(f_a, f_b); same physical layer only"),
        *floats("overlap_chance", "k/E: topk_overlap of independent choices"),
        *floats("jaccard_chance", "topk_jaccard of independent choices"),
        *counts(
            "relative_delta_excluded growth_excluded state_cosine_excluded update_cosine_excluded",
            "tokens left out because the denominator is below 1e-12",
        ),
        *counts("nonfinite_count", "non-finite entries of both h among the valid tokens"),
    ),
)

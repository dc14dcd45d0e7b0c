"""What a probe over a fixed corpus gives beside `probe_router`: losses per stratum, overlaps per pair."""

from __future__ import annotations

from loopscope.store.schema import Column, TableSchema
from loopscope.store.tables.keys import ROW_KEY, RUN_KEYS, floats
from loopscope.store.tables.router import CORPUS

PROBE_LOSS = TableSchema(
    name="probe_loss",
    doc="One row per probe step and stratum of the corpus; step s describes the parameters after update s.",
    primary_key=(*ROW_KEY, "corpus_hash", "stratum_kind", "stratum"),
    columns=(
        *RUN_KEYS,
        *CORPUS,
        Column(
            "stratum_kind",
            "string",
            "all, repetition, domain, in_context_token, in_context_bigram",
            required=True,
        ),
        Column("stratum", "string", "the bucket's or domain's name", required=True),
        *floats("loss_mean", "loss_sum/num_target_tokens, nats per token"),
        *floats("loss_sum", "summed cross-entropy, nats"),
        Column("num_target_tokens", "int64", "tokens with a target in the stratum"),
        Column("num_documents", "int32", "documents with a token in the stratum"),
    ),
)

PROBE_OVERLAP = TableSchema(
    name="probe_overlap",
    doc="One row per probe step, physical layer of the loop and pair of loop steps: the overlap matrix.",
    primary_key=(*ROW_KEY, "corpus_hash", "layer_idx", "from_loop_step", "to_loop_step"),
    columns=(
        *RUN_KEYS,
        *CORPUS,
        Column("layer_idx", "int32", "physical layer in the stack", required=True),
        Column("from_loop_step", "int32", "the earlier pass through the stack", required=True),
        Column("to_loop_step", "int32", "the later pass through the stack", required=True),
        Column("from_pos", "int32", "unrolled_pos of the earlier visit"),
        Column("to_pos", "int32", "unrolled_pos of the later visit"),
        Column("num_loop_steps", "int32", "R really executed"),
        Column("num_experts", "int32", "E of this layer"),
        Column("top_k", "int32", "k of this layer"),
        Column("num_tokens", "int64", "tokens of the corpus"),
        *floats("topk_overlap", "mean_t |S_a ∩ S_b|/k"),
        *floats("topk_jaccard", "mean_t |S_a ∩ S_b|/|S_a ∪ S_b|"),
        *floats("load_overlap", "Σ_e min(f_a, f_b)"),
        *floats("overlap_chance", "k/E: topk_overlap of independent choices"),
        *floats("jaccard_chance", "topk_jaccard of independent choices"),
    ),
)

"""`probe_loss`: the loss over a fixed corpus, per stratum."""

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
        Column("stratum_kind", "string", "all, repetition or domain", required=True),
        Column("stratum", "string", "the bucket's or domain's name", required=True),
        *floats("loss_mean", "loss_sum/num_target_tokens, nats per token"),
        *floats("loss_sum", "summed cross-entropy, nats"),
        Column("num_target_tokens", "int64", "tokens with a target in the stratum"),
        Column("num_documents", "int32", "documents in the stratum"),
    ),
)

"""Columns that several tables share."""

from __future__ import annotations

from loopscope.store.schema import Column

RUN_KEYS = (
    Column("run_id", "string", "UUIDv7 of the run", required=True),
    Column("attempt", "int32", "attempt of the run that wrote the row, from 1", required=True),
    Column("step", "int64", "optimizer step, from 1; 0 is the initialisation (probes)", required=True),
    Column("rank", "int32", "rank that the row describes; null for a global row"),
    Column("world_size", "int32", "ranks of this attempt"),
    Column("aggregation_scope", "string", "rank_local or global"),
    Column("tokens_seen", "int64", "training tokens up to and including this step, over all ranks"),
    Column("elapsed_s", "float64", "seconds since the attempt began, on a monotonic clock"),
    Column("wall_time", "timestamp[us, UTC]", "time of writing on the wall clock, which may jump"),
    Column("null_reasons", "string", "JSON object: column → why it is null; null when nothing is missing"),
)
"""Every table but `attempt` starts with these."""

RUN_KEY_NAMES = tuple(column.name for column in RUN_KEYS if column.name != "null_reasons")
"""What a row that is made beside another row of its step takes over from it."""

VISIT_KEYS = (
    Column("block", "string", "head, loop or tail"),
    Column("unrolled_pos", "int32", "0-based depth in the unrolled network", required=True),
    Column("loop_step", "int32", "pass through the stack; null outside the loop"),
    Column("layer_idx", "int32", "physical layer in the stack; null outside the loop"),
    Column("num_loop_steps", "int32", "R really executed this step"),
    Column("num_experts", "int32", "E of this layer; 0 where it is dense"),
    Column("top_k", "int32", "k of this layer; 0 where it is dense"),
    Column("score_func", "string", "softmax or sigmoid"),
)

TOKEN_KEYS = (
    Column("num_tokens", "int64", "valid tokens that the row reduces"),
    Column("num_microbatches", "int32", "microbatches that the row reduces"),
)

ROW_KEY = ("run_id", "attempt", "step", "aggregation_scope", "rank")
VISIT_KEY = (*ROW_KEY, "unrolled_pos")


def floats(names: str, doc: str = "") -> tuple[Column, ...]:
    """A float64 column per name in a blank-separated list."""
    return tuple(Column(name, "float64", doc) for name in names.split())


def counts(names: str, doc: str = "", *, since: int = 1) -> tuple[Column, ...]:
    """An int64 column per name in a blank-separated list."""
    return tuple(Column(name, "int64", doc, since=since) for name in names.split())

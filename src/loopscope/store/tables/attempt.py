"""`attempt`: one row per attempt of the run; one join with it gives any engine the live rows."""

from __future__ import annotations

from loopscope.store.schema import Column, TableSchema

ATTEMPT = TableSchema(
    name="attempt",
    doc=(
        "One row per attempt. A row of another table is live where its attempt's "
        "live_from <= step and (live_to is null or step < live_to)."
    ),
    primary_key=("run_id", "attempt"),
    progress=False,
    columns=(
        Column("run_id", "string", "UUIDv7 of the run", required=True),
        Column("attempt", "int32", "number of the attempt, from 1", required=True),
        Column("parent_attempt", "int32", "attempt whose checkpoint it loaded; null when fresh"),
        Column("first_step", "int64", "first step it trains: restored step + 1", required=True),
        Column("live_from", "int64", "first live step; null where no row of the attempt is live"),
        Column("live_to", "int64", "first step that a later attempt replaces; null where none does"),
        Column("world_size", "int32", "ranks of the attempt"),
        Column("host", "string", "host that claimed it"),
        Column("pid", "int32", "process that claimed it"),
        Column("started", "timestamp[us, UTC]", "when it was claimed"),
        Column("loopscope_version", "string", "version that wrote it"),
        Column("torch_version", "string", "version of torch that trained; null where unknown"),
        Column("python_version", "string", "version of Python that trained"),
    ),
)

"""`health`: what loopscope noticed about the run, and about itself."""

from __future__ import annotations

from loopscope.store.schema import Column, TableSchema
from loopscope.store.tables.keys import RUN_KEYS, floats

HEALTH = TableSchema(
    name="health",
    doc="One row per event: coverage, dropped rows, errors as text, non-finite values, timings.",
    primary_key=(),
    progress=False,
    columns=(
        *RUN_KEYS,
        Column("event", "string", "what happened", required=True),
        Column("severity", "string", "info, warn or critical"),
        Column("unrolled_pos", "int32", "the visit concerned; null where none"),
        Column("count", "int64", "how many"),
        *floats("value", "how much"),
        Column("detail", "string", "text for people"),
    ),
)

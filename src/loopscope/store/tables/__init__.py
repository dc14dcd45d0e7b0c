"""The schema registry: every table, at its newest version. A new table is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping

from loopscope.store.schema import TableSchema, registry
from loopscope.store.tables.attempt import ATTEMPT
from loopscope.store.tables.health import HEALTH
from loopscope.store.tables.loss import LOSS
from loopscope.store.tables.probe import PROBE_LOSS, PROBE_OVERLAP
from loopscope.store.tables.probe_deep import DEEP
from loopscope.store.tables.residual import RESIDUAL, TRANSITION
from loopscope.store.tables.router import PROBE_ROUTER, ROUTER

TABLES: Mapping[str, TableSchema] = registry(
    (LOSS, ROUTER, RESIDUAL, TRANSITION, PROBE_ROUTER, PROBE_LOSS, PROBE_OVERLAP, *DEEP, HEALTH, ATTEMPT)
)
"""Table name → schema."""

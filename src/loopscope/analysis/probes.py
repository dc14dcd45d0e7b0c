"""Comparing probes: only where they ran over the same tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from loopscope.analysis.records import records
from loopscope.analysis.run import Run
from loopscope.analysis.scope import scope_of
from loopscope.catalog.registry import TABLES
from loopscope.catalog.tables.keys import ROW_KEY
from loopscope.errors import ConfigError, ProbeError

# What names a probe itself, or is the time of another.
_OF_THE_PROBE = {*ROW_KEY, "corpus_hash", "from_step"}
_TABLES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    table.name: (
        tuple(name for name in table.primary_key if name not in _OF_THE_PROBE),
        tuple(column.name for column in shown),
    )
    for table in TABLES.values()
    if (shown := table.shown("probe_diff")) and "corpus_hash" in table.names
}
"""Table → what names a row within one probe, and the values that are compared."""


def require_same_corpus(first: Sequence[str], second: Sequence[str]) -> str:
    """The one corpus hash that both sides have.

    Raises:
        ProbeError: a side has none or several, or they differ; the message holds the hashes.
    """
    one, other = (sorted(set(hashes)) for hashes in (first, second))
    if len(one) != 1 or len(other) != 1 or one != other:
        raise ProbeError(
            f"probes over different tokens cannot be compared: corpus_hash {', '.join(one) or 'none'} on one side, "
            f"{', '.join(other) or 'none'} on the other; expected one and the same. Probe both with the same corpus, "
            "tokenizer and length."
        )
    return one[0]


def compare_probes(
    first: Run,
    second: Run,
    table: str = "probe_loss",
    *,
    first_step: int | None = None,
    second_step: int | None = None,
    corpus_hash: str | None = None,
) -> pa.Table:
    """What changed between two probes: a row per row of the probe and value, with both values and the change.

    Args:
        first: the run compared from.
        second: the run compared to; may be the same run.
        table: one of the probe tables.
        first_step: the probe's step; None takes the last one.
        second_step: the same of the second run.
        corpus_hash: look at this corpus only, where a run was probed with several.

    Returns:
        The key columns, `metric`, `first`, `second`, `change` (second − first).

    Raises:
        ProbeError: the probes ran over different tokens, or there is none; both hashes are in the message.
        ConfigError: no such table.
    """
    if table not in _TABLES:
        raise ConfigError(f"table is {table!r}, expected one of {', '.join(_TABLES)}")
    keys, metrics = _TABLES[table]
    sides = [
        _probe(run, table, (*keys, *metrics), step, corpus_hash)
        for run, step in ((first, first_step), (second, second_step))
    ]
    require_same_corpus(*([row["corpus_hash"] for row in rows] for rows in sides))
    named = [{tuple(row[key] for key in keys): row for row in rows} for rows in sides]
    values = [
        (*key, metric, named[0][key][metric], named[1][key][metric])
        for key in named[0] if key in named[1] for metric in metrics
    ]  # fmt: skip
    found = [(*value, None if None in value[-2:] else value[-1] - value[-2]) for value in values]
    names = (*keys, "metric", "first", "second", "change")
    return pa.table({name: [value[at] for value in found] for at, name in enumerate(names)})


def _probe(
    run: Run, table: str, columns: Sequence[str], step: int | None, corpus_hash: str | None
) -> list[dict[str, Any]]:
    names = ", ".join(("step", "corpus_hash", *columns))
    rows = [
        row
        for row in records(run, f"select {names} from {table} where {scope_of(run, table).where}")
        if corpus_hash in (None, row["corpus_hash"])
    ]
    if not rows:
        raise ProbeError(f"{run.path} has no row of {table}; expected a run that was probed")
    steps = sorted({row["step"] for row in rows})
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise ProbeError(f"{run.path} has no probe at step {wanted}, expected one of {steps}")
    return [row for row in rows if row["step"] == wanted]

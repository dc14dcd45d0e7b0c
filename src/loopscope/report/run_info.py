"""What a run is, in a few short facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loopscope.analysis.records import value
from loopscope.report.queries import RunQueries


def run_info(queries: RunQueries) -> list[tuple[str, str]]:
    """(name, text) pairs; what is not known is left out."""
    manifest = queries.run.manifest
    found = [
        ("run", manifest.run_id),
        ("created", f"{manifest.created:%Y-%m-%d %H:%M} UTC"),
        ("steps", f"{queries.last_step():,}" if queries.run.tables else "none yet"),
        ("tokens", _count(queries, "loss", "max(tokens_seen)")),
        ("task loss", _loss(queries)),
        ("traced steps", _count(queries, "router", "count(distinct step)")),
        ("attempts", str(len(queries.run.attempts))),
        ("ranks", str(max((a.world_size for a in queries.run.attempts), default=1))),
        ("model", _model(manifest.trace_meta, manifest.expected_visits)),
        ("loopscope", manifest.loopscope_version),
        ("torch", manifest.versions.get("torch", "")),
    ]
    if manifest.rebuilt:
        found.append(("run.json", "missing or invalid: put together from the rows"))
    if manifest.parent_run_id:
        found.append(("branched from", f"{manifest.parent_run_id} at step {manifest.parent_step}"))
    return [(name, text) for name, text in found if text]


def _count(queries: RunQueries, table: str, expression: str) -> str:
    if not queries.has(table):
        return ""
    number = value(queries.run, f"select {expression} from {table}")
    return "" if number is None else f"{number:,}"


def _loss(queries: RunQueries) -> str:
    """The last and the lowest task loss: no rule judges its course, but people do."""
    if not queries.has("loss"):
        return ""
    where = f"{queries.scope('loss').where} and isfinite(task_loss)"
    (row,) = queries.rows(
        "select max(step) as step, arg_max(task_loss, step) as last, min(task_loss) as least, "
        f"arg_min(step, task_loss) as at from loss where {where}"
    )
    if row["step"] is None:
        return ""
    return f"{row['last']:.4g} at step {row['step']:,}; lowest {row['least']:.4g} at step {row['at']:,}"


def _model(meta: Mapping[str, Any] | None, visits: list[dict[str, Any]]) -> str:
    if not visits:
        return ""
    loop = [v for v in visits if v.get("block") == "loop"]
    parts = [f"{len(visits)} visits"]
    if meta:
        parts.append(f"{meta.get('num_stacks')} loop steps × {meta.get('num_layers_in_stack')} layers")
    sizes = sorted({(v.get("num_experts"), v.get("top_k")) for v in loop or visits})
    parts.append(", ".join(f"{k} of {e} experts" if e else "dense" for e, k in sizes))
    return "; ".join(parts)

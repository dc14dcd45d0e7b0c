"""What a run is, in a few short facts."""

from collections.abc import Mapping
from typing import Any

from loopscope.analysis.records import value
from loopscope.report.queries import RunQueries


def run_info(queries: RunQueries) -> list[tuple[str, str]]:
    """(name, text) pairs; what is not known is left out."""
    manifest, attempts = queries.run.manifest, queries.run.attempts
    parent = manifest.parent_run_id
    found = [
        ("run", manifest.run_id),
        ("created", f"{manifest.created:%Y-%m-%d %H:%M} UTC"),
        ("steps", f"{queries.last_step():,}" if queries.run.tables else "none yet"),
        ("tokens", _count(queries, "loss", "max(tokens_seen)")),
        ("task loss", _loss(queries)),
        ("traced steps", _count(queries, "router", "count(distinct step)")),
        ("attempts", str(len(attempts))),
        ("ranks", str(max((a.world_size for a in attempts), default=1))),
        ("model", _model(manifest.trace_meta, manifest.expected_visits)),
        ("loopscope", manifest.loopscope_version),
        ("torch", manifest.versions.get("torch", "")),
        ("run.json", "missing or invalid: put together from the rows" if manifest.rebuilt else ""),
        ("left out of run.json", _redacted(manifest.redacted)),
        ("branched from", f"{parent} at step {manifest.parent_step}" if parent else ""),
    ]
    return [(name, text) for name, text in found if text]


def _redacted(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"what looks like a secret in {shown}" if names else ""


def _count(queries: RunQueries, table: str, expression: str) -> str:
    number = value(queries.run, f"select {expression} from {table}") if queries.has(table) else None
    return "" if number is None else f"{number:,}"


def _loss(queries: RunQueries) -> str:
    """The last and the lowest task loss: no rule judges its course, but people do."""
    row: dict[str, Any] = {"step": None}
    if queries.has("loss"):
        (row,) = queries.rows(
            "select max(step) as step, arg_max(task_loss, step) as last, min(task_loss) as least, "
            f"arg_min(step, task_loss) as at from {queries.speaking('loss', 'isfinite(task_loss)')}"
        )
    if row["step"] is None:
        return ""
    return f"{row['last']:.4g} at step {row['step']:,}; lowest {row['least']:.4g} at step {row['at']:,}"


def _model(meta: Mapping[str, Any] | None, visits: list[dict[str, Any]]) -> str:
    loop = [visit for visit in visits if visit.get("block") == "loop"]
    sizes = sorted({(visit.get("num_experts"), visit.get("top_k")) for visit in loop or visits})
    experts = ", ".join(f"{k} of {e} experts" if e else "dense" for e, k in sizes)
    shape = (
        f"; {meta.get('num_stacks')} loop steps × {meta.get('num_layers_in_stack')} layers" if meta else ""
    )
    return f"{len(visits)} visits{shape}; {experts}" if visits else ""

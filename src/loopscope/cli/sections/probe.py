"""The fixed corpus: its loss by repetition, domain and repetition in context, first and last probe."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from loopscope.analysis import Run
from loopscope.cli.console import make_table, titled
from loopscope.cli.sections.rows import change, fetch, missing_note, scope_note

_ORDER = {"all": 0, "repetition": 1, "domain": 2, "in_context_token": 3, "in_context_bigram": 4}
_BUCKETS = {"low": 0, "mid": 1, "high": 2}
_SEEN = {"in_context_token": "target seen", "in_context_bigram": "bigram seen"}


def section(run: Run) -> list[RenderableType]:
    """One table per corpus (tokens and tokenizer): different hashes never compare."""
    found = fetch(
        run,
        "probe_loss",
        "select step, corpus_name, corpus_hash, stratum_kind, stratum, loss_mean, num_documents, num_target_tokens, "
        "null_reasons from probe_loss where {where} order by step",
    )
    if not found:
        return [Text("Probe: none ran", style="yellow")]
    note = scope_note(run, "probe_loss")
    hashes = dict.fromkeys(row["corpus_hash"] for row in found)
    return [
        part for one in hashes for part in _corpus([row for row in found if row["corpus_hash"] == one], note)
    ]


def _label(kind: str, name: str) -> str:
    if kind in _SEEN:
        return f"{_SEEN[kind]} {name}×"
    return name if kind == "all" else f"{kind} {name}"


def _corpus(rows: list[dict[str, Any]], scope: str) -> list[RenderableType]:
    steps = sorted({row["step"] for row in rows})
    first, last = steps[0], steps[-1]
    by_key = {(row["stratum_kind"], row["stratum"], row["step"]): row for row in rows}
    strata = sorted(
        {(row["stratum_kind"], row["stratum"]) for row in rows},
        key=lambda key: (_ORDER.get(key[0], 9), _BUCKETS.get(key[1], 9), key[1]),
    )
    shown, cells = [], []
    for kind, name in strata:
        before, after = by_key.get((kind, name, first), {}), by_key.get((kind, name, last), {})
        # A bucket that no token falls into has no loss, which is no gap in the data.
        shown += [row for row in (before, after) if row and row.get("num_target_tokens") != 0]
        documents = (after or before).get("num_documents")
        start, end = before.get("loss_mean"), after.get("loss_mean")
        cells.append((_label(kind, name), documents, start, end, change(start, end)))
    columns = ["stratum", "documents", f"step {first}", f"step {last}", "change"]
    table = make_table(columns, cells, left=["stratum"])
    title = (
        f"Probe loss (nats per token), corpus {rows[0]['corpus_name']} {rows[0]['corpus_hash'][:12]}, "
        f"{len(steps)} probe(s){scope}"
    )
    return [*titled(title, table), *missing_note(shown, ["loss_mean"])]

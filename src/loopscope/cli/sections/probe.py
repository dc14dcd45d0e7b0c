"""The fixed corpus: its loss, the experts that loop steps choose, and what every pass through the loop adds."""

import itertools
from operator import itemgetter
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from loopscope.analysis import Run, scope_of
from loopscope.catalog.rows import evenly
from loopscope.cli.console import make_table, number, titled
from loopscope.cli.sections.rows import VISIT_COLUMNS, change, fetch, label, missing_note

_ORDER = {"all": 0, "repetition": 1, "domain": 2, "in_context_token": 3, "in_context_bigram": 4}
_BUCKETS = {"low": 0, "mid": 1, "high": 2}
_LABELS = {"all": "{}", "in_context_token": "target seen {}×", "in_context_bigram": "bigram seen {}×"}
_READOUT = ("loss_mean", "kl_from_previous", "entropy_mean", "argmax_settled")
_MOST_COLUMNS = 10
"""A wider matrix of overlaps is shown at this many loop steps, spread evenly from the first to the last."""


def losses(run: Run) -> list[RenderableType]:
    """One table per corpus (tokens and tokenizer): different hashes never compare."""
    found = fetch(
        run,
        "probe_loss",
        "select step, corpus_name, corpus_hash, stratum_kind, stratum, loss_mean, num_documents, num_target_tokens, "
        "null_reasons from probe_loss where {where} order by step",
    )
    if not found:
        return [Text("Probe: none ran", style="yellow")]
    note = scope_of(run, "probe_loss").note
    return [
        part
        for corpus in dict.fromkeys(row["corpus_hash"] for row in found)
        for part in _corpus([row for row in found if row["corpus_hash"] == corpus], note)
    ]


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
        start, end = before.get("loss_mean"), after.get("loss_mean")
        stratum = _LABELS.get(kind, f"{kind} {{}}").format(name)
        cells.append((stratum, (after or before).get("num_documents"), start, end, change(start, end)))
    columns = ["stratum", "documents", f"step {first}", f"step {last}", "change"]
    table = make_table(columns, cells, left=["stratum"])
    title = (
        f"Probe loss (nats per token), corpus {rows[0]['corpus_name']} {rows[0]['corpus_hash'][:12]}, "
        f"{len(steps)} probe(s){scope}"
    )
    return [*titled(title, table), *missing_note(shown, ["loss_mean"])]


def overlap(run: Run) -> list[RenderableType]:
    """A matrix per physical layer of the loop; nothing where no probe found a pair of loop steps."""
    columns = "corpus_hash, layer_idx, from_loop_step, to_loop_step, topk_overlap, overlap_chance"
    found = _last(run, "probe_overlap", columns, "corpus_hash, layer_idx")
    layers = itertools.groupby(found, key=itemgetter("corpus_hash", "layer_idx"))
    return [part for _, rows in layers for part in _matrix(list(rows))]


def _matrix(rows: list[dict[str, Any]]) -> list[RenderableType]:
    every = sorted({row[name] for row in rows for name in ("from_loop_step", "to_loop_step")})
    steps = evenly(every, _MOST_COLUMNS)
    overlap = {(row["from_loop_step"], row["to_loop_step"]): row["topk_overlap"] for row in rows}
    cells = [
        (first, *(1 if one == first else overlap.get((min(first, one), max(first, one))) for one in steps))
        for first in steps
    ]
    table = make_table(["loop step", *(str(step) for step in steps)], cells, digits=3)
    one = rows[0]
    title = (
        f"Top-k overlap of loop steps, layer {one['layer_idx']}, probe at step {one['step']}, corpus "
        f"{one['corpus_name']}; by chance {number(one['overlap_chance'], 3)}"
    )
    shown = [Text(f"{len(steps)} of {len(every)} loop steps shown", style="dim")]
    return [
        *titled(title, table),
        *(shown if len(steps) < len(every) else ()),
        *missing_note(rows, ["topk_overlap"]),
    ]


def deep(run: Run) -> list[RenderableType]:
    """A table of readouts, one of the routing of every visit; nothing where no deep probe ran."""
    return [*_readouts(run), *_visits(run)]


def _last(run: Run, table: str, columns: str, order: str) -> list[dict[str, Any]]:
    return fetch(
        run,
        table,
        f"select step, corpus_name, null_reasons, {columns} from {table} where {{where}} and "
        f"step = (select max(step) from {table}) order by {order}",
    )


def _readouts(run: Run) -> list[RenderableType]:
    found = _last(run, "probe_readout", f"readout, loop_step, {', '.join(_READOUT)}", "readout, loop_step")
    if not found:
        return []
    title = (
        f"Readout per loop step, through the {found[0]['readout']}, probe at step {found[0]['step']}, corpus "
        f"{found[0]['corpus_name']}"
    )
    table = make_table(
        ["after loop step", "loss, nats", "KL from the one before", "entropy", "arg-max settled"],
        [(row["loop_step"], *(row[name] for name in _READOUT)) for row in found],
    )
    return [*titled(title, table), *missing_note(found, _READOUT)]


def _visits(run: Run) -> list[RenderableType]:
    margins = _last(
        run,
        "probe_margin",
        f"{VISIT_COLUMNS}, quantity, shuffle_scope, rho_cal, cell, calibrated",
        "unrolled_pos",
    )
    if not margins:
        return []
    disturbed = _last(run, "probe_perturbation", "unrolled_pos, amplification, flipped_share", "unrolled_pos")
    growth = {row["unrolled_pos"]: row for row in disturbed}
    rho = {(row["unrolled_pos"], row["quantity"]): row["rho_cal"] for row in margins}
    seen = {row["unrolled_pos"]: row for row in margins}
    cells = [
        (
            position,
            label(row),
            *(rho.get((position, quantity)) for quantity in ("margin", "selection_gap")),
            row["cell"],
            *(growth.get(position, {}).get(name) for name in ("amplification", "flipped_share")),
        )
        for position, row in seen.items()
    ]
    columns = ["pos", "visit", "margin", "selection gap", "reading", "disturbance", "choice flipped"]
    table = make_table(columns, cells, left=["visit", "reading"], digits=3)
    one = margins[0]
    title = (
        f"Margins over their null ({one['shuffle_scope']} shuffles; 1: no structure), growth of a disturbance; "
        f"step {one['step']}"
    )
    remarks = {
        "scores are bounded: margins without structure lie outside 1": not all(
            r["calibrated"] for r in margins
        ),
        "no perturbation: see probe_skipped in the health table": not growth,
    }
    return [*titled(title, table), *(Text(said, style="dim") for said, holds in remarks.items() if holds)]

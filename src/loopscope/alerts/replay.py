"""The rules over the rows of a run that are stored already: for a report, and for an attempt that goes on with it.

The engine is the one that runs beside the training. Rows that cannot change its state are left out beforehand, in
arrays (`columns.py`), so that a replay costs as much as reading the columns, and a sick visit a little more.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loopscope.alerts import columns as states
from loopscope.alerts.batches import SCOPE, Lists, pieces
from loopscope.alerts.columns import Ints, floats, ints, needed
from loopscope.alerts.engine import AlertEngine
from loopscope.alerts.replay_state import ReplayState, state_of
from loopscope.alerts.settings import AlertSettings
from loopscope.store import RunReader
from loopscope.store.attempts import live_ranges

_ROUTER = (
    "num_experts", "top_k", "num_tokens", "maxvio_count", "load_entropy_ratio", "token_entropy_ratio",
    "mutual_information", "z_mean", "logit_abs_max", "dead_experts",
)  # fmt: skip
_VISIT = ("block", "unrolled_pos", "loop_step", "layer_idx")
_COUNTS = Lists(column="expert_count", where="dead_experts")
_LOSS = (
    "total_loss",
    "closure_error",
    "nonfinite_fields",
    "lb_loss",
    "lb_loss_factor",
    "z_loss",
    "z_loss_factor",
)
_PAIR = ("kind", "to_layer_idx", "to_loop_step", "growth", "relative_delta")
_HEALTH = ("step", "attempt", "event", "severity", "unrolled_pos", "count", "detail")
_ALERT = "alert"


def replay_run(reader: RunReader, settings: AlertSettings) -> AlertEngine:
    """The rules' state after the run's live rows: that of the training itself, had the rules been on."""
    engine = AlertEngine(settings)
    _loss(engine, reader)
    _router(engine, reader)
    _residual(engine, reader)
    _transition(engine, reader)
    _health(engine, reader)
    return engine


def state_before(reader: RunReader, settings: AlertSettings, attempt: int) -> ReplayState:
    """What the new attempt `attempt`, which has no rows yet, knows of the run before its first step."""
    # As if it had rows: those of its ancestors, up to where it goes on, are live.
    reader.live = live_ranges(reader.attempts, [attempt])
    engine = replay_run(reader, settings)
    told = []
    for chunk in reader.iterate("health", live=False, columns=_HEALTH):
        chunk = chunk.filter(pc.equal(chunk["event"], _ALERT))
        for row in chunk.to_pylist():
            live = reader.live.get(row["attempt"])
            told.append(
                (row["detail"] or "", row["severity"] or "", live is not None and live.holds(row["step"]))
            )
    return state_of(engine, told)


def _loss(engine: AlertEngine, reader: RunReader) -> None:
    opened: set[int] = set()
    for rows in pieces(reader, "loss", (*SCOPE, *_LOSS)):
        step = ints(rows, "step", 0)
        state = states.closure_state(
            floats(rows, "closure_error"), floats(rows, "total_loss"), engine.settings
        )
        wanted = needed([state], np.zeros(len(step), np.int64), step, opened)
        wanted |= np.asarray(rows["nonfinite_fields"].is_valid())
        _observe(engine, "loss", rows, np.flatnonzero(wanted), step)


def _router(engine: AlertEngine, reader: RunReader) -> None:
    opened: set[int] = set()
    blocks: dict[str, int] = {"loop": 0, "tail": 1}
    for rows in pieces(reader, "router", (*SCOPE, *_VISIT, *_ROUTER), lists=_COUNTS):
        rows = _after_warmup(rows, engine.settings)
        if not rows.num_rows:
            continue
        step = ints(rows, "step", 0)
        key = _subjects(rows, step, blocks)
        values = {name: floats(rows, name) for name in _ROUTER}
        wanted = needed(states.router_states(values, engine.settings), key, step, opened)
        # A tail visit's name is its place among its step's tail visits, so they stay together.
        is_tail = key >> _SHIFT == 1
        wanted |= is_tail & np.isin(step, step[wanted & is_tail])
        _observe(engine, "router", rows, np.flatnonzero(wanted), step)


def _residual(engine: AlertEngine, reader: RunReader) -> None:
    opened: set[int] = set()
    wanted_columns = (*SCOPE, "block", "unrolled_pos", "token_correlation")
    for rows in pieces(reader, "residual", wanted_columns):
        rows = _after_warmup(rows, engine.settings)
        rows = rows.filter(pc.equal(rows["block"], "loop"))
        step, position = ints(rows, "step", 0), ints(rows, "unrolled_pos", -1)
        order = np.lexsort((position, step))
        last = (
            order[np.flatnonzero(np.r_[step[order][1:] != step[order][:-1], True])] if len(order) else order
        )
        rows, step = rows.take(pa.array(last)), step[last]
        state = states.token_correlation_state(floats(rows, "token_correlation"), engine.settings)
        wanted = needed([state], np.zeros(len(step), np.int64), step, opened)
        _observe(engine, "residual", rows, np.flatnonzero(wanted), step)


def _transition(engine: AlertEngine, reader: RunReader) -> None:
    growing: set[int] = set()
    moving: set[int] = set()
    settings = engine.settings
    for rows in pieces(reader, "transition", (*SCOPE, *_PAIR)):
        rows = _after_warmup(rows, settings)
        rows = rows.filter(pc.equal(rows["kind"], "step_boundary"))
        layer, end, step = (ints(rows, n, -1) for n in ("to_layer_idx", "to_loop_step", "step"))
        order = np.lexsort((end, layer, step))
        if not len(order):
            continue
        rows, layer, end, step = rows.take(pa.array(order)), layer[order], end[order], step[order]
        begins = np.flatnonzero(np.r_[True, (step[1:] != step[:-1]) | (layer[1:] != layer[:-1])])
        ends = np.r_[begins[1:], len(order)]
        delta = floats(rows, "relative_delta")[ends - 1]
        growth = states.growth_state(*_last_three(floats(rows, "growth"), begins, ends), settings)
        by_growth = needed([growth], layer[begins], step[begins], growing)
        for i, (low, high) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            of = int(layer[low])
            value = None if np.isnan(delta[i]) else float(delta[i])
            best = engine.best_mean(of, int(end[high - 1]))
            bad = False
            if value is not None and best.best is not None and best.best > 0:
                bad = value > settings.clear_at * 0.999 * settings.relative_delta * best.best
                wanted = bad or of in moving
                moving.add(of) if bad else moving.discard(of)
            else:
                wanted = False
            if wanted or by_growth[i]:
                engine.observe("transition", int(step[low]), rows.slice(low, high - low).to_pylist())
            elif value is not None:
                best.see(value)


def _health(engine: AlertEngine, reader: RunReader) -> None:
    found: list[dict[str, Any]] = []
    for chunk in reader.iterate("health", columns=_HEALTH):
        noticed = pc.and_(chunk["severity"].is_valid(), pc.not_equal(chunk["severity"], "info"))
        found += chunk.filter(noticed.combine_chunks().fill_null(False)).to_pylist()
    # Within an attempt they stay as they were written: a late loss's event comes late here as well.
    found.sort(key=lambda row: reader.live[row["attempt"]].start)
    for row in found:
        engine.observe("health", row["step"], [row])


_SHIFT, _WIDTH = 48, 24


def _subjects(rows: pa.Table, step: Ints, blocks: dict[str, int]) -> Ints:
    """A number per visit that is the same whenever its name is."""
    block = rows["block"].combine_chunks().fill_null("").dictionary_encode()
    codes = np.array(
        [blocks.setdefault(name, len(blocks)) for name in block.dictionary.to_pylist()], np.int64
    )
    code = codes[np.asarray(block.indices)]
    position = ints(rows, "unrolled_pos", 0)
    inside = (ints(rows, "loop_step", 0) << _WIDTH) + ints(rows, "layer_idx", 0)
    tails = np.flatnonzero(code == 1)
    order = tails[np.lexsort((position[tails], step[tails]))]
    place = np.zeros(len(code), np.int64)
    if len(order):
        first = np.r_[True, step[order][1:] != step[order][:-1]]
        index = np.arange(len(order))
        place[order] = index - np.maximum.accumulate(np.where(first, index, 0))
    within: Ints = np.where(code == 0, inside, np.where(code == 1, place, position))
    named: Ints = within + (code << _SHIFT)
    return named


def _last_three(growth: states.Floats, begins: Ints, ends: Ints) -> tuple[Any, Any, Any]:
    """Per group the last three values that are there; NaN where there are fewer."""
    there = ~np.isnan(growth)
    values = growth[there]
    count = np.r_[0, np.cumsum(there)]
    low, high = count[begins], count[ends]
    enough = high - low >= 3
    padded = values if len(values) else np.full(1, np.nan)
    return tuple(
        np.where(enough, padded[np.clip(high - back, 0, len(padded) - 1)], np.nan) for back in (3, 2, 1)
    )  # type: ignore[return-value]  # three of them


def _after_warmup(rows: pa.Table, settings: AlertSettings) -> pa.Table:
    return rows.filter(pc.greater(rows["step"], settings.warmup_steps))


def _observe(engine: AlertEngine, table: str, rows: pa.Table, chosen: Ints, step: Ints) -> None:
    """Feed the chosen rows, a step at a time."""
    if not len(chosen):
        return
    order = chosen[np.argsort(step[chosen], kind="stable")]
    found = rows.take(pa.array(order)).to_pylist()
    for at, group in itertools.groupby(found, key=lambda row: int(row["step"])):
        engine.observe(table, at, list(group))

"""Rows of a chunk as arrays, and which of them a rule could say something about.

Most rows of most runs keep every bound and end no alert. A row matters to a rule where its value is above the
clearing bound (it may begin or prolong a streak), or where it is the first judged row after such a one (it may end
it). Everything else leaves the engine as it was, so a replay leaves it out. Each function here gives a state per
row: 1 above the clearing bound, 0 below it, -1 where the rule cannot judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from loopscope.alerts.rules import FALL
from loopscope.alerts.settings import AlertSettings

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

_EPS = 1e-9
"""The engine divides; here a row on the bound counts as above it, which costs a look and changes nothing."""


def floats(table: pa.Table, name: str) -> Floats:
    """A column as float64, NaN where it is null."""
    column = table[name].combine_chunks().cast(pa.float64())
    return np.asarray(column.fill_null(float("nan")).to_numpy(zero_copy_only=False), dtype=np.float64)


def ints(table: pa.Table, name: str, null: int) -> Ints:
    """A column as int64, `null` where it is null."""
    column = table[name].combine_chunks().cast(pa.int64())
    return np.asarray(column.fill_null(null).to_numpy(zero_copy_only=False), dtype=np.int64)


def router_states(columns: Mapping[str, Floats], s: AlertSettings) -> list[Ints]:
    """States of the rules over one visit's row: maxvio, load_entropy, router_collapse, z, dead_expert."""
    experts, k, tokens = columns["num_experts"], columns["top_k"], columns["num_tokens"]
    known = (experts > 0) & (k > 0) & (tokens > 0)
    with np.errstate(all="ignore"):
        log_e = np.log(experts)
        noise = s.maxvio_noise * np.sqrt(2 * log_e * experts / (k * tokens))
        bound = np.maximum(s.maxvio_share * (experts / k - 1), noise)
        maxvio = np.where(known & (experts > k), columns["maxvio_count"] / bound, np.nan)
        load = _shortfall(columns["load_entropy_ratio"], s.load_entropy)
        worst = np.maximum(columns["token_entropy_ratio"], columns["mutual_information"] / log_e)
        collapse = np.where(experts >= 2, np.where(worst > 0, s.collapse / worst, np.inf), np.nan)
        collapse = np.where(np.isnan(worst), np.nan, collapse)
        mean = np.where(experts > 0, np.abs(columns["z_mean"]) / (log_e + s.z_above), np.nan)
        z = np.fmax(mean, columns["logit_abs_max"] / s.logit_abs_max)
        dead = np.where(known, columns["dead_experts"], np.nan)
    states = [_state(value, s.clear_at) for value in (maxvio, load, collapse, z)]
    return [*states, _state(dead, 0.5)]


def token_correlation_state(value: Floats, s: AlertSettings) -> Ints:
    """State of token_correlation."""
    return _state(value / s.token_correlation, s.clear_at)


def growth_state(first: Floats, middle: Floats, last: Floats, s: AlertSettings) -> Ints:
    """State of loop_growth, of growth at three step boundaries; NaN where there are fewer."""
    with np.errstate(invalid="ignore"):
        falling = (first > middle) & (middle > last) & ((last - 1) < (1 - FALL) * (first - 1))
    excess = (last - 1) / (s.growth - 1) if s.growth > 1 else last / s.growth
    # Near the edge between falling and not, the engine decides.
    edge = np.abs((last - 1) - (1 - FALL) * (first - 1)) <= _EPS * np.abs(first)
    return _state(np.where(falling & ~edge, 0.0 * last, excess), s.clear_at)


def closure_state(error: Floats, total: Floats, s: AlertSettings) -> Ints:
    """State of closure."""
    return _state(np.abs(error) / (s.closure * np.maximum(1.0, np.abs(total))), s.clear_at)


def needed(states: list[Ints], key: Ints, step: Ints, opened: set[int]) -> Flags:
    """The rows that the engine must see.

    Args:
        states: per rule, a state per row.
        key: the row's subject, as a number.
        step: the row's step.
        opened: subjects of which some rule's last judged row before these was above its bound; becomes that of what
            comes after these.
    """
    found = np.zeros(len(key), dtype=np.bool_)
    if not len(key):
        return found
    order = np.lexsort((step, key))
    keys = key[order]
    begins = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    ends = np.r_[begins[1:], len(keys)] - 1
    subjects = keys[begins]
    was_open = np.isin(subjects, np.fromiter(opened, np.int64, len(opened)))
    now_open = np.zeros(len(subjects), dtype=np.bool_)
    sizes = ends - begins + 1
    for state in states:
        ordered = state[order]
        upto = _last_judged(ordered, begins)
        before = np.r_[-1, upto[:-1]]
        before[begins] = -1
        before = np.where((before == -1) & np.repeat(was_open, sizes), 1, before)
        found[order] |= (ordered == 1) | ((ordered == 0) & (before == 1))
        now_open |= (upto[ends] == 1) | ((upto[ends] == -1) & was_open)
    opened.difference_update(subjects.tolist())
    opened.update(subjects[now_open].tolist())
    return found


def _last_judged(state: Ints, begins: Ints) -> Ints:
    """Per row, the last state up to it, of its own group, that is not -1; -1 where there is none."""
    index = np.arange(len(state))
    group = np.zeros(len(state), dtype=np.int64)
    group[begins] = begins
    group = np.maximum.accumulate(group)
    last = np.maximum.accumulate(np.where(state >= 0, index, -1))
    return np.where(last >= group, state[np.maximum(last, 0)], -1)


def _state(excess: Floats, clear_at: float) -> Ints:
    with np.errstate(invalid="ignore"):
        above = excess > clear_at * (1 - _EPS)
    return np.where(np.isnan(excess), -1, np.where(above, 1, 0)).astype(np.int64)


def _shortfall(value: Floats, bound: float) -> Floats:
    if bound < 1:
        return (1 - value) / (1 - bound)
    return np.where(np.isnan(value), np.nan, bound / np.maximum(value, 1e-12))

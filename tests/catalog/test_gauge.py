"""A gauge over many steps at once is what a plain loop over each step's rows gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.catalog.gauge import Gauge, evaluate, evaluate_by_step
from loopscope.catalog.registry import GAUGES, TABLES

HOWS = ("max", "min", "mean", "sum", "last", "place of max", "only")


def gauge(how, **more):
    place = "at" if how in ("last", "place of max") else ""
    return Gauge(key="a/b", table="t", column="v", how=how, place=place, **more)


def by_hand(how, rows):
    """The value of one step's rows, in order of `at`; rows are (at, v)."""
    known = [(v, at) for at, v in rows if v is not None]
    if how == "only":
        return rows[0][1]
    if how == "last":
        return max(rows)[1] if len({at for at, _ in rows}) == len(rows) else None
    if not known:
        return None
    return {
        "max": max(known)[0],
        "place of max": max(known)[1],
        "min": min(known)[0],
        "mean": math.fsum(v for v, _ in known) / len(known),
        "sum": math.fsum(v for v, _ in known),
    }[how]


_STEP = st.lists(
    st.tuples(st.integers(0, 6), st.one_of(st.none(), st.sampled_from([-1.5, 0.0, 0.25, 2.0]))),
    min_size=1,
    max_size=6,
    unique_by=lambda row: row[0],
)


@pytest.mark.parametrize("how", HOWS)
@given(steps=st.lists(_STEP, min_size=1, max_size=5))
def test_every_step_is_what_a_loop_over_its_rows_gives(how, steps):
    rows = [(step, at, v) for step, rows in enumerate(steps, 1) for at, v in rows]
    columns = {
        "step": [r[0] for r in rows],
        "at": [r[1] for r in rows],
        "v": [r[2] for r in rows],
    }
    found = evaluate_by_step(gauge(how), columns)
    assert found.step.tolist() == list(range(1, len(steps) + 1))
    for index, step in enumerate(steps):
        wanted = by_hand(how, step)
        value = found.value[index]
        assert (None if math.isnan(value) else value) == (None if wanted is None else pytest.approx(wanted))
        nulls = sum(v is None for _, v in step)
        assert found.skipped[index] == (0 if how in ("last", "only") else nulls)


def test_the_last_pass_keeps_its_null():
    columns = {"at": [4, 2, 6], "v": [1.2, 1.1, None]}
    assert evaluate(gauge("last"), columns) == (None, 0)
    assert evaluate(gauge("max"), columns) == (1.2, 1)


def test_what_is_not_finite_counts_as_null_whoever_wrote_it():
    assert evaluate(gauge("last"), {"at": [1, 2], "v": [1.0, math.nan]}) == (None, 0)
    assert evaluate(gauge("sum"), {"at": [1, 2], "v": [1.0, math.inf]}) == (1.0, 1)


def test_only_the_rows_that_are_wanted_count():
    columns = {"at": [1, 2], "v": [1.0, 2.0], "kind": ["wrap", "step_boundary"]}
    assert evaluate(gauge("sum", where=(("kind", "wrap"),)), columns) == (1.0, 0)
    assert evaluate(gauge("sum", where=(("kind", "exit"),)), columns) == (None, 0)


def test_no_row_gives_no_step():
    found = evaluate_by_step(gauge("mean"), {"step": [], "at": [], "v": []})
    assert len(found.step) == len(found.value) == 0


def test_arrays_and_lists_are_the_same():
    columns = {"at": np.array([1.0, 2.0]), "v": np.array([np.nan, 3.0])}
    assert evaluate(gauge("last"), columns) == (3.0, 0)


def test_every_gauge_is_of_columns_that_exist():
    for one in GAUGES.values():
        assert set(one.needs) <= set(TABLES[one.table].names), one.key
        assert one.help
        assert bool(one.title) == bool(one.text) == bool(one.axis)
    assert len({one.name for one in GAUGES.values()}) == len(GAUGES)

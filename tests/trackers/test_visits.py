from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.trackers.backends.tensorboard import TEXT_ROWS, markdown
from loopscope.trackers.visits import COLUMNS, MAX_ROWS, MAX_TABLES, TableSchedule, visit_table


def router(depth):
    return [{"unrolled_pos": pos, "block": "loop", "maxvio_count": pos / 10} for pos in range(depth)]


def test_a_row_per_visit_by_depth_with_what_belongs_to_it():
    tables = {
        "router": list(reversed(router(3))),
        "residual": [{"unrolled_pos": 1, "rms": 2.0}],
        "transition": [
            {"kind": "within_step", "to_pos": 2, "relative_delta": 9.0},
            {"kind": "step_boundary", "to_pos": 2, "relative_delta": 0.5},
        ],
    }
    table = visit_table(7, tables)
    assert table.columns == COLUMNS
    assert [row[COLUMNS.index("step")] for row in table.rows] == [7, 7, 7]
    assert table.column("unrolled_pos") == [0, 1, 2]
    assert table.column("rms") == [2.0]  # a missing value is None in the table, and in no column
    assert table.column("relative_delta") == [0.5]
    assert table.rows[0][COLUMNS.index("rms")] is None
    assert visit_table(7, {"residual": [{"unrolled_pos": 1}]}) is None


@given(st.integers(1, 5000))
def test_a_deep_model_is_thinned_evenly_and_says_so(depth):
    table = visit_table(1, {"router": router(depth)})
    positions = table.column("unrolled_pos")
    assert len(positions) == min(depth, MAX_ROWS)
    assert len(positions) + table.left_out == depth
    assert positions[0] == 0
    assert positions[-1] == depth - 1
    gaps = {b - a for a, b in pairwise(positions)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert min(gaps, default=1) >= 1


@pytest.mark.parametrize(("depth", "left_out"), [(5, 0), (TEXT_ROWS, 0), (64 * 32, 64 * 32 - TEXT_ROWS)])
def test_the_text_table_is_short(depth, left_out):
    text = markdown(visit_table(1, {"router": router(depth)}))
    assert text.count("\n| ") == min(depth, TEXT_ROWS)
    assert (f"{left_out} of {depth} visits are left out" in text) == bool(left_out)
    assert "| – |" in text


@given(every=st.integers(1, 1000), first=st.integers(0, 1000))
def test_tables_stay_few_in_a_long_training(every, first):
    schedule = TableSchedule()
    shown = [step for step in range(first, 100_001, every) if schedule.is_due(step)]
    assert len(shown) == schedule.shown <= MAX_TABLES
    assert shown[0] == first
    assert shown[-1] * 1.25 + every > 100_000 or len(shown) == MAX_TABLES


def test_how_many_tables_the_ordinary_schedule_gives():
    traced = sorted({*range(1, 11), *(2**n for n in range(10)), *range(10, 100_001, 10)})
    schedule = TableSchedule()
    shown = [step for step in traced if schedule.is_due(step)]
    assert len(shown) == 45
    assert shown[:6] == [1, 2, 3, 4, 5, 7]

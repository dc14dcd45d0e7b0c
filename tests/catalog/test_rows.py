"""Which rows speak for a run, in NumPy and in SQL; what a visit is called."""

from __future__ import annotations

import duckdb
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from loopscope.catalog.rows import VISIT, VISIT_INDEX, speaking, speaking_sql, visit_label, visit_labels

_ROWS = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.sampled_from([("global", None), ("rank_local", 0), ("rank_local", 1), ("rank_local", 2)]),
    ),
    max_size=12,
)


def columns(rows):
    return {
        "step": [step for step, _ in rows],
        "aggregation_scope": [scope for _, (scope, _) in rows],
        "rank": [rank for _, (_, rank) in rows],
    }


@given(_ROWS)
def test_numpy_and_sql_choose_the_same_rows(rows):
    given_columns = columns(rows)
    chosen = speaking(given_columns).tolist()
    ranks = [rank for _, (_, rank) in rows if rank is not None]
    where = speaking_sql(
        "t",
        any_global=any(scope == "global" for _, (scope, _) in rows),
        any_local=any(scope != "global" for _, (scope, _) in rows),
        lowest=min(ranks, default=None),
    )
    with duckdb.connect() as connection:
        schema = {"step": pa.int64(), "aggregation_scope": pa.string(), "rank": pa.int32()}
        arrays = {name: pa.array(given_columns[name], kind) for name, kind in schema.items()}
        connection.register("t", pa.table({**arrays, "i": list(range(len(rows)))}))
        by_sql = connection.sql(f"select i from t where {where} order by i").fetchall()
    assert [i for (i,) in by_sql] == [i for i, one in enumerate(chosen) if one]


def test_global_rows_alone_where_a_step_has_any_else_the_lowest_rank():
    rows = [
        (1, ("rank_local", 1)), (1, ("rank_local", 2)), (2, ("global", None)), (2, ("rank_local", 1)),
        (3, ("rank_local", 2)),
    ]  # fmt: skip
    assert speaking(columns(rows)).tolist() == [True, False, True, False, False]


def test_a_part_of_a_table_is_told_its_lowest_rank():
    rows = [(3, ("rank_local", 2))]
    assert speaking(columns(rows)).tolist() == [True]
    assert speaking(columns(rows), lowest=0).tolist() == [False]


def test_a_run_that_recorded_no_rank_speaks_with_every_row():
    assert speaking(columns([(1, (None, None)), (2, (None, None))])).tolist() == [True, True]


def test_visits_are_named_alike_at_every_depth():
    visits = {
        "step": [1, 1, 1, 1, 2, 2],
        "block": ["head", "loop", "tail", "tail", "tail", None],
        "unrolled_pos": [0, 1, 5, 6, 3, 7],
        "loop_step": [None, 0, None, None, None, None],
        "layer_idx": [None, 2, None, None, None, None],
    }
    found = visit_labels(visits)
    assert found == ["head 0", "loop step 0, layer 2", "tail 0", "tail 1", "tail 0", "depth 7"]
    with duckdb.connect() as connection:
        connection.register("t", pa.table(visits))
        query = f"select {', '.join(VISIT)}, {VISIT_INDEX} as i from t order by step, unrolled_pos"
        rows = connection.sql(query).fetchall()
    by_sql = [visit_label(block, loop_step, layer, index) for block, _, loop_step, layer, index in rows]
    assert sorted(by_sql) == sorted(found)


def test_a_table_that_also_has_rank_local_rows_speaks_with_its_global_ones_alone():
    assert speaking_sql("t", any_global=True, any_local=False, lowest=0) == "aggregation_scope = 'global'"

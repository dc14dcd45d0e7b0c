"""The collector's rows, the metric registry and the store's schemas name the same columns."""

import pytest
import torch
from collect_helpers import meta, sink, specs
from test_collector import LOSS, collector

from loopscope.catalog.registry import TRAINING_METRICS
from loopscope.store import TABLES

TRACED = ("loss", "router", "residual", "transition")


@pytest.mark.parametrize("table", TRACED)
def test_every_metric_is_a_column_of_its_type(table):
    types = {column.name: column.type for column in TABLES[table].columns}
    metrics = {
        name: metric.type for (of_table, name), metric in TRAINING_METRICS.items() if of_table == table
    }
    assert {name: types.get(name) for name in metrics} == metrics


def _rows():
    writer, made = collector()
    made.on_metrics_step(1, LOSS)
    made.on_trace_step(1, sink(), meta())
    made.on_probe_step(1, sink(), meta(), torch.zeros(2, 5))
    return writer.tables


@pytest.mark.parametrize("table", [*TRACED, "probe_router", "probe_overlap", "probe_loss", "health"])
def test_every_column_is_written_and_no_other(table):
    columns = {column.name for column in TABLES[table].columns}
    written = {name for row in _rows()[table] for name in row}
    # Alerts fill theirs in on the way to the store.
    optional = {"null_reasons", "rule", "subject", "since"} if table == "health" else set()
    assert written == columns - optional


def test_dense_and_failed_rows_know_no_other_columns():
    visits = specs(loop=(0, 0))
    writer, made = collector(visits=visits)
    made.on_trace_step(1, sink(visits), meta())
    window = sink()
    window[2].topk_idx[0, 0, 0] = 99
    failing_writer, failing = collector("record")
    failing.on_trace_step(1, window, meta())
    for tables in (writer.tables, failing_writer.tables):
        for table in ("router", "residual", "transition"):
            columns = {column.name for column in TABLES[table].columns}
            assert {name for row in tables[table] for name in row} <= columns

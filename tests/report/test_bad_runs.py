"""Runs that are hardly there, damaged, or from the future."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from page_reader import Page
from report_runs import Shape, generated_run

from loopscope import open_run
from loopscope.cli import main
from loopscope.report import write_report
from loopscope.store import TABLES, Column, RunStore

pytestmark = pytest.mark.usefixtures("no_bundle")


def report(run, tmp_path):
    out = tmp_path / "report.html"
    parts = write_report([open_run(run)], out)
    return Page(out), parts[0]


def rows_of(path, rows, tables=TABLES):
    with RunStore.create(path, tables=tables) as store:
        store.claim_attempt(first_step=1)
        writer = store.writer(attempt=1)
        for table, row in rows:
            writer.append(table, {"aggregation_scope": "global"} | row)
    return path


def test_an_empty_run(tmp_path):
    with RunStore.create(tmp_path / "run"):
        pass
    page, part = report(tmp_path / "run", tmp_path)
    assert part.state == "empty"
    assert "There are no rows yet" in page.text
    assert page.charts == {}


def test_one_step(tmp_path):
    run = generated_run(tmp_path / "run", Shape(steps=1, every=1))
    page, part = report(run, tmp_path)
    assert part.state == "young"
    assert len(page.rows("r0-loss")) == 2
    assert page.rows("r0-load_entropy")[0]["until"] > 1


def test_losses_without_traces(tmp_path):
    run = rows_of(tmp_path / "run", [("loss", {"step": s, "task_loss": 2.0}) for s in range(1, 6)])
    page, part = report(run, tmp_path)
    assert part.findings.found == ()
    assert "The run has no row of the table router" in page.text
    assert "total_loss is missing in 5 of 5 rows: no reason recorded." in page.text
    assert [row["value"] for row in page.rows("r0-loss")] == [2] * 5


def test_nothing_but_nulls(tmp_path):
    shape = Shape(steps=40)
    changes = {
        table: {
            column.name: None
            for column in TABLES[table].columns
            if column.type in ("float64", "list<int64>") and column.name != "elapsed_s"
        }
        for table in ("loss", "router", "residual", "transition", "probe_loss")
    }
    changes["loss"]["nonfinite_fields"] = "task_loss,total_loss"
    changes["router"]["null_reasons"] = '{"z_mean": "nonfinite"}'
    page, part = report(generated_run(tmp_path / "run", replace(shape, changes=changes)), tmp_path)
    assert [f.rule for f in part.findings.found] == ["nonfinite"]
    assert part.state == "critical"
    assert "z_mean is missing in 80 of 80 rows: nonfinite." in page.text
    assert "r0-load_entropy" not in page.charts


def test_nan_in_a_float_column_is_never_drawn(tmp_path):
    # The collector writes none; another writer might.
    rows = 8 * 10
    entropy = pa.array(np.full(rows, np.nan))
    run = generated_run(
        tmp_path / "run", Shape(steps=40, changes={"router": {"load_entropy_ratio": entropy}})
    )
    page, part = report(run, tmp_path)
    assert "r0-load_entropy" not in page.charts
    assert [(f.rule, f.severity) for f in part.findings.found] == [("nonfinite", "critical")]
    assert "80 values of the rows, in router.load_entropy_ratio." in page.text
    (check,) = [check for check in part.checks if check.title == "Every value is finite"]
    assert check.state == "critical"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_one_value_everywhere(tmp_path, value):
    # What another writer might write: every page is made, and says what is wrong.
    whole = generated_run(tmp_path / "whole", Shape(steps=80))
    lengths = {
        table: len(pq.ParquetDataset(whole / "tables" / table).read(["step"]))
        for table in ("loss", "router", "residual", "transition", "probe_loss")
    }
    changes = {
        table: {c.name: np.full(count, value) for c in TABLES[table].columns if c.type == "float64"}
        for table, count in lengths.items()
    }
    page, part = report(generated_run(tmp_path / "run", Shape(steps=80, changes=changes)), tmp_path)
    assert ("nonfinite" in [f.rule for f in part.findings.found]) == (not np.isfinite(value))
    assert "NaN" not in page.scripts[0]
    assert "Infinity" not in page.scripts[0]


def test_the_first_gradients_after_none_are_no_spike(tmp_path):
    norms = np.where(np.arange(80) < 60, 0.0, 1.0)
    page, _ = report(
        generated_run(tmp_path / "run", Shape(steps=80, changes={"loss": {"grad_norm": norms}})), tmp_path
    )
    assert "No spike" in page.text


def test_a_schema_from_the_future(tmp_path):
    old = TABLES["loss"]
    later = Column(name="later", formula="new", since=old.version + 1)
    new = replace(old, columns=(*old.columns, later), version=old.version + 1)
    rows = [("loss", {"step": 1, "task_loss": 2.0, "later": 1.0})]
    run = rows_of(tmp_path / "run", rows, tables={**TABLES, "loss": new})
    page, part = report(run, tmp_path)
    assert page.rows("r0-loss")[0]["value"] == 2
    assert [(f.rule, f.severity) for f in part.findings.found] == [("files", "warn")]
    assert "later" in page.text


def test_a_damaged_part_is_the_first_thing_said(tmp_path):
    run = generated_run(tmp_path / "run", Shape(steps=40))
    part_file = next((run / "tables" / "router").iterdir())
    data = bytearray(part_file.read_bytes())
    data[len(data) // 2] ^= 1
    part_file.write_bytes(data)
    page, part = report(run, tmp_path)
    assert part.findings.found[0].rule == "files"
    assert part.state == "critical"
    assert part_file.name in page.text


def test_a_run_that_is_not_there_is_the_wrong_question(tmp_path, capsys):
    assert main(["report", str(tmp_path / "gone"), "-o", str(tmp_path / "a.html")]) == 2
    assert "is not a run" in capsys.readouterr().err
    assert not (tmp_path / "a.html").exists()

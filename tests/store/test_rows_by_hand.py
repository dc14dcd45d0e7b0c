"""Rows by hand: scalars of other libraries are values; what is none is null and told, and takes no row along."""

from __future__ import annotations

import json
import logging
import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from store_runs import QUIET, loss, visit

from loopscope import findings, open_run
from loopscope.errors import SchemaError
from loopscope.store import RunStore, StoreOptions

RECORD = StoreOptions(tick_s=3600.0, seal_in="thread")
BIG = 2**53 + 1
WHEN = datetime(2026, 3, 4, 5, 6, 7, 89, tzinfo=UTC)


class Level(IntEnum):
    HIGH = 3


class Loss(float):
    pass


GOOD: list[tuple[str, Any, Any]] = [
    *[("task_loss", kind(4.5), 4.5) for kind in (np.float16, np.float32, np.float64, np.longdouble)],
    *[("task_loss", kind(4), 4.0) for kind in (np.int8, np.int64, np.uint8, np.uint64)],
    *[("tokens_seen", kind(100), 100) for kind in (np.int8, np.int32, np.int64, np.uint16, np.uint64)],
    ("tokens_seen", np.int64(BIG), BIG),
    ("tokens_seen", np.array(BIG), BIG),
    ("tokens_seen", torch.tensor(BIG), BIG),
    ("tokens_seen", Decimal(BIG), BIG),
    ("tokens_seen", 600.0, 600),
    ("tokens_seen", np.float64(600.0), 600),
    ("tokens_seen", torch.tensor(600.0), 600),
    ("rank", Level.HIGH, 3),
    *[("task_loss", torch.tensor(4.5, dtype=t), 4.5) for t in (torch.bfloat16, torch.float16, torch.float64)],
    ("task_loss", torch.tensor([4.5]), 4.5),
    ("task_loss", torch.tensor(4.5, requires_grad=True), 4.5),
    ("task_loss", torch.tensor(4), 4.0),
    ("task_loss", np.array(4.5), 4.5),
    ("task_loss", np.array([[4.5]]), 4.5),
    ("task_loss", Decimal("4.5"), 4.5),
    ("task_loss", Fraction(9, 2), 4.5),
    ("task_loss", Loss(4.5), 4.5),
    ("task_loss", 4, 4.0),
    ("task_loss", None, None),
    ("task_loss", pd.NA, None),
    ("tokens_seen", pd.NA, None),
    ("task_loss", np.ma.masked, None),
    ("aggregation_scope", np.str_("global"), "global"),
    ("wall_time", pd.Timestamp(WHEN), WHEN),
    ("wall_time", np.datetime64("2026-03-04T05:06:07.000089"), WHEN),
    ("wall_time", np.datetime64("2026-03-04T05:06:07.000089000"), WHEN),
    ("wall_time", WHEN.astimezone(timezone(timedelta(hours=9))), WHEN),
]  # fmt: skip

KINDS: tuple[Any, ...] = (float, np.float32, np.float64, Decimal)
BAD: list[tuple[str, Any, str]] = [
    *[("task_loss", kind(text), "nonfinite") for kind in KINDS for text in ("nan", "inf", "-inf")],
    ("task_loss", torch.tensor(float("nan"), dtype=torch.bfloat16), "nonfinite"),
    ("tokens_seen", float("nan"), "nonfinite"),
    ("tokens_seen", np.float64("inf"), "nonfinite"),
    ("task_loss", True, "failed"),
    ("task_loss", np.True_, "failed"),
    ("task_loss", "4.5", "failed"),
    ("task_loss", b"4", "failed"),
    ("task_loss", np.array([4.5, 5.5]), "failed"),
    ("task_loss", torch.ones(2), "failed"),
    ("task_loss", torch.ones(0), "failed"),
    ("task_loss", torch.empty((), device="meta"), "failed"),
    ("task_loss", 1 + 2j, "failed"),
    ("task_loss", np.complex64(1), "failed"),
    ("task_loss", [4.5], "failed"),
    ("task_loss", {"loss": 4.5}, "failed"),
    ("task_loss", object(), "failed"),
    ("task_loss", 10**400, "failed"),
    ("task_loss", np.timedelta64(5, "ns"), "failed"),
    ("task_loss", np.datetime64("2026-01-01", "ns"), "failed"),
    ("tokens_seen", True, "failed"),
    ("tokens_seen", np.True_, "failed"),
    ("tokens_seen", 600.5, "failed"),
    ("tokens_seen", 2.0**60, "failed"),
    ("tokens_seen", "600", "failed"),
    ("tokens_seen", np.uint64(2**64 - 1), "failed"),
    ("tokens_seen", np.timedelta64(5, "ns"), "failed"),
    ("rank", 2**31, "failed"),
    ("rank", np.int64(2**31), "failed"),
    ("aggregation_scope", 1, "failed"),
    ("aggregation_scope", Path("x"), "failed"),
]  # fmt: skip


def written(root: Path, rows: list[dict[str, Any]], table: str = "loss") -> tuple[list[dict[str, Any]], Any]:
    with RunStore.create(root, options=RECORD) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        for row in rows:
            writer.append(table, row)
        assert (writer.attempted, writer.dropped) == (len(rows), 0)
    run = open_run(root)
    return run.arrow(table).to_pylist(), run


def test_a_scalar_of_another_library_is_its_value(tmp_path: Path) -> None:
    rows = [loss(np.int64(step), **{name: value}) for step, (name, value, _) in enumerate(GOOD, 1)]
    found, run = written(tmp_path / "run", rows)
    assert [row["step"] for row in found] == list(range(1, len(GOOD) + 1))
    for row, (name, given, right) in zip(found, GOOD, strict=True):
        assert row[name] == right, (name, given)
        assert row["null_reasons"] is None
        assert name == "task_loss" or row["task_loss"] == 1.0
    assert "health" not in run.tables


def test_a_value_that_is_none_is_null_with_its_reason_and_takes_nothing_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"grad_norm": 12.0, "null_reasons": '{"lr": "absent:none"}'}
    rows = [loss(step, **more, **{name: value}) for step, (name, value, _) in enumerate(BAD, 1)]
    with caplog.at_level(logging.WARNING, logger="loopscope.store"):
        found, run = written(tmp_path / "run", rows)
    for row, (name, given, reason) in zip(found, BAD, strict=True):
        assert row[name] is None, (name, given)
        assert row["grad_norm"] == 12.0
        assert json.loads(row["null_reasons"]) == {"lr": "absent:none", name: reason}
        assert row["nonfinite_fields"] == (name if reason == "nonfinite" else None)
    counts = {row["event"]: row["count"] for row in run.arrow("health").to_pylist()}
    bad = sum(reason == "nonfinite" for *_, reason in BAD)
    assert counts == {"nonfinite": bad, "bad_value": len(BAD) - bad}
    assert {(one.rule, one.severity) for one in findings(run).found} >= {
        ("nonfinite", "critical"),
        ("dropped", "critical"),
    }
    assert caplog.records  # at once; what a column has told already it does not tell again
    assert len(caplog.records) == len({(name, reason) for name, _, reason in BAD})


def test_it_is_told_before_the_writer_closes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunStore.create(tmp_path / "run", options=RECORD) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        writer.append("loss", loss(1, math.nan))
        assert "task_loss" in caplog.text
        writer.append("loss", {"step": 2, "tusk_loss": 1.0})
        assert "tusk_loss" in caplog.text
        writer.tick()
        events = open_run(tmp_path / "run").arrow("health").to_pylist()
        assert {(row["event"], row["count"]) for row in events} == {("nonfinite", 1), ("dropped_rows", 1)}


@pytest.mark.parametrize(
    ("given", "right", "reason"),
    [
        (np.array([BIG, 0]), [BIG, 0], None),
        (torch.tensor([BIG, 0]), [BIG, 0], None),
        ((np.int64(BIG), torch.tensor(0)), [BIG, 0], None),
        (np.array([1.0, 2.0]), None, "failed"),
        (np.array([1.0, math.nan]), None, "nonfinite"),
        ([1.0, math.inf], None, "nonfinite"),
        (np.ones((2, 2)), None, "failed"),
        (np.ma.array([1, 2], mask=[False, True]), None, "failed"),
        ("12", None, "failed"),
        ([1, "2"], None, "failed"),
    ],
)
def test_lists(tmp_path: Path, given: Any, right: Any, reason: str | None) -> None:
    (row,), _ = written(tmp_path / "run", [visit(1, expert_count=given, z_mean=2.0)], "router")
    assert (row["expert_count"], row["z_mean"]) == (right, 2.0)
    assert json.loads(row["null_reasons"] or "{}") == ({} if reason is None else {"expert_count": reason})


def test_a_part_of_a_distributed_tensor_is_no_value(tmp_path: Path) -> None:
    class Part:
        dtype, shape = np.dtype("float32"), ()

        def __init__(self, whole: bool) -> None:
            self.placements = [type("Placement", (), {"is_replicate": lambda self: whole})()]

        def item(self) -> float:
            return 4.5

    (part, whole), _ = written(tmp_path / "run", [loss(1, Part(False)), loss(2, Part(True))])  # type: ignore[arg-type]
    assert (part["task_loss"], whole["task_loss"]) == (None, 4.5)


@pytest.mark.parametrize("step", [None, math.nan, "1", 1.5, True, np.float32(1.5), date(2026, 1, 1)])
def test_a_row_without_its_key_is_dropped_and_told(
    tmp_path: Path, step: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with RunStore.create(tmp_path / "run", options=RECORD) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        writer.append_many("loss", [loss(1), loss(step), loss(3)])
        assert writer.dropped == 1
        assert "step" in caplog.text
    assert open_run(tmp_path / "run").arrow("loss")["step"].to_pylist() == [1, 3]


@pytest.mark.parametrize(("name", "value", "reason"), BAD[::3])
def test_under_raise_a_value_that_is_none_is_refused(
    tmp_path: Path, name: str, value: Any, reason: str
) -> None:
    with RunStore.create(tmp_path / "run", options=QUIET) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        writer.append("loss", loss(np.int64(1), task_loss=np.float32(4.5)))
        with pytest.raises(SchemaError, match=name):
            writer.append("loss", loss(2, **{name: value}))

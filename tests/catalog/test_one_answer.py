"""Every reader gives the same numbers of one run: a null last pass, null visits, two ranks without a global row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from page_reader import Page
from service_runs import client, loss_row
from tracker_helpers import Remembering

from loopscope.catalog.registry import GAUGES
from loopscope.cli import main
from loopscope.cli.console import number
from loopscope.collect import ObservedWriter
from loopscope.collect.headline import headline
from loopscope.report import page as report_page
from loopscope.store import RunStore
from loopscope.trackers import GuardedTracker, TrackerObserver

STEPS = (4, 8)
# (block, loop step, layer) by depth; two loop steps of two layers.
VISITS = (
    ("head", None, None),
    *(("loop", r, layer) for r in (0, 1, 2) for layer in (0, 1)),
    ("tail", None, None),
)


def rows_of(rank: int, step: int) -> dict[str, list[dict[str, Any]]]:
    """Table → rows of one rank at one step. The last pass of the last step has no growth, a visit no MaxVio."""
    last = step == STEPS[-1]
    router = [
        {
            "block": block, "unrolled_pos": pos, "loop_step": loop_step, "layer_idx": layer, "num_experts": 16,
            "top_k": 2, "load_entropy_ratio": 0.9 - 0.01 * pos - 0.1 * rank, "dead_experts": 1 + rank,
            "maxvio_count": None if last and pos == 2 else 0.25 * pos + rank, "z_mean": 2.0 + rank,
            "token_entropy_ratio": 0.5, "margin_mean": 0.125 + rank, "logit_abs_max": 8.0 + rank,
        }
        for pos, (block, loop_step, layer) in enumerate(VISITS)
    ]  # fmt: skip
    residual = [
        {**{name: row[name] for name in ("block", "unrolled_pos", "loop_step", "layer_idx")}, "token_correlation": 0.01}
        for row in router
    ]  # fmt: skip
    transition = [
        {
            "kind": "step_boundary", "from_pos": pos, "to_pos": pos + 2, "from_loop_step": (pos - 1) // 2,
            "to_loop_step": (pos + 1) // 2, "from_layer_idx": (pos - 1) % 2, "to_layer_idx": (pos - 1) % 2,
            "relative_delta": 0.5 / pos + rank, "growth": None if last and pos == 4 else 1.0 + 0.125 * pos + rank,
            "state_cosine": 0.75, "topk_overlap": 0.5, "overlap_chance": 0.125,
            "null_reasons": json.dumps({"growth": "nonfinite"}) if last and pos == 4 else None,
        }
        for pos in (1, 2, 3, 4)
    ]  # fmt: skip
    wrap = [
        {
            "kind": "wrap",
            "from_pos": 6,
            "to_pos": 7,
            "relative_delta": 9.0,
            "growth": 9.0,
            "topk_overlap": 0.1,
        }
    ]
    probe = [
        {
            "corpus_name": "core", "corpus_hash": "a" * 64, "stratum_kind": kind, "stratum": stratum,
            "loss_mean": 3.0 + extra + rank,
        }
        for extra, (kind, stratum) in enumerate((("all", "all"), ("repetition", "low"), ("domain", "code")))
    ]  # fmt: skip
    loss = [
        {"task_loss": 4.0 + rank, "total_loss": 4.5 + rank, "closure_error": 0.0, "lb_loss": 1.0, "lr": 1e-3}
    ]
    return {
        "router": router, "residual": residual, "transition": transition + wrap, "probe_loss": probe,
        "health": [{"event": "coverage", "severity": "info", "value": 1.0, "count": 8}], "loss": loss,
    }  # fmt: skip


EXPECTED = {
    "loss/task": 4.0, "loss/total": 4.5, "loss/closure_error": 0.0, "moe/lb_loss": 1.0, "optim/lr": 1e-3,
    "moe/maxvio_max": 1.75, "moe/maxvio_pos": 7.0, "moe/dead": 8.0, "moe/load_entropy_min": 0.9 - 0.07,
    "moe/token_entropy_min": 0.5, "moe/margin_min": 0.125, "moe/z_mean": 2.0, "moe/logit_abs_max": 8.0,
    "loop/relative_delta_last": 0.125, "loop/state_cosine_last": 0.75, "loop/topk_overlap_last": 0.5,
    "loop/token_corr_last": 0.01, "probe/loss": 3.0, "probe/loss_repetition_low": 4.0, "health/coverage": 1.0,
}  # fmt: skip
"""Rank 0's gauges at the last step; every other one, `loop/growth_last` among them, is null."""


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, Remembering]:
    """A run of two ranks with rank-local rows alone, rank 1's first; and the tracker beside rank 0."""
    root, tracker = tmp_path_factory.mktemp("runs"), Remembering()
    with RunStore.create(root / "one", run_name="one") as store:
        attempt = store.claim_attempt(first_step=1, world_size=2)
        keys = {
            "run_id": store.run_id,
            "attempt": attempt.attempt,
            "aggregation_scope": "rank_local",
            "world_size": 2,
        }

        def start(tell):
            guarded = GuardedTracker("t", lambda: tracker, limit=60, on_error="raise", tell=tell)
            guarded.start()
            return [guarded]

        writers = {
            rank: store.writer(attempt=attempt, writer=f"r{rank}", on_error="raise") for rank in (1, 0)
        }
        own = {**keys, "rank": 0, "step": 0}
        trackers = TrackerObserver(
            start,
            write=lambda row: writers[0].append("health", row),
            dropped=lambda: writers[0].dropped,
            keys=own,
            attempt=1,
            on_error="raise",
        )
        tracking = ObservedWriter(writers[0], [trackers])
        for step in STEPS:
            for rank, writer in ((1, writers[1]), (0, tracking)):
                for table, rows in rows_of(rank, step).items():
                    for row in rows:
                        writer.append(
                            table, {**keys, "rank": rank, "step": step, "tokens_seen": step * 100, **row}
                        )
        trackers.close()
    other = RunStore.create(root / "two", run_name="two")
    writer = other.writer(attempt=other.claim_attempt(first_step=1))
    writer.append("loss", loss_row(1))
    other.close()
    return root, tracker


def test_the_tracker_and_the_trainers_log(written):
    *_, last = (values for values in written[1].steps if values.scalars)
    found = {key: value for key, value in last.scalars.items() if key in GAUGES}
    assert (last.step, found) == (STEPS[-1], pytest.approx(EXPECTED))
    assert headline(rows_of(0, STEPS[-1])) == pytest.approx(
        {key: value for key, value in EXPECTED.items() if GAUGES[key].headline}
    )
    before = next(values for values in written[1].steps if values.step == STEPS[0])
    assert before.scalars["loop/growth_last"] == 1.5


def test_the_api_and_prometheus(written):
    browser = client(written[0])
    key = next(run["key"] for run in browser.get("/api/runs").json()["runs"] if run["name"] == "one")
    found = browser.get(f"/api/runs/{key}").json()["headline"]
    by_name = {gauge.name: EXPECTED.get(key) for key, gauge in GAUGES.items()}
    assert {name: found[name] for name in by_name} == pytest.approx(by_name)
    assert found["loop_growth_last"] is None
    assert found["skipped"]["moe_maxvio_max"] == 1
    assert found["scope"] == "rank-local: rank 0 of 2"
    samples = dict(
        re.findall(rf'^loopscope_(\w+)\{{run="one",key="{key}"\}} (\S+)$', browser.get("/metrics").text, re.M)
    )
    wanted = {gauge.name: EXPECTED.get(key) for key, gauge in GAUGES.items() if gauge.headline}
    assert {name: float(value) for name, value in samples.items() if name in wanted} == pytest.approx(
        {name: value for name, value in wanted.items() if value is not None}
    )


@pytest.mark.parametrize("verb", ["summary", "watch"])
def test_the_terminal(written, capsys, verb):
    assert main([verb, str(written[0] / "one")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for key, gauge in GAUGES.items():
        if gauge.table in ("router", "transition", "residual"):
            assert re.search(rf"{key} {re.escape(number(EXPECTED.get(key)))}(?![\d.])", text), key
    assert "moe/maxvio_max 1.750 (1 rows without a value left out)" in text
    assert "rank-local: rank 0 of 2" in text
    assert "loop step 2, layer 1" in text


def test_the_report_and_the_comparison(written, monkeypatch):
    monkeypatch.setattr(report_page, "script_bundle", lambda: "")
    browser = client(written[0])
    keys = {run["name"]: run["key"] for run in browser.get("/api/runs").json()["runs"]}
    charts = browser.get(f"/api/runs/{keys['one']}/charts").json()
    growth = charts["r0-growth"]["data"]
    rows = [dict(zip(growth["columns"], row, strict=True)) for row in zip(*growth["values"], strict=True)]
    drawn = {(row["step"], row["loop step"]): row["value"] for row in rows}
    assert drawn[STEPS[-1], 2] is None
    assert (drawn[STEPS[0], 2], drawn[STEPS[-1], 1]) == (1.5, 1.25)

    page = Page(browser.get("/compare?" + "&".join(f"run={key}" for key in keys.values())).text)
    for gauge in GAUGES.values():
        if gauge.title and gauge.key in EXPECTED:
            last = [row for row in page.rows(f"c-{gauge.column}") if row["run"] == "one"][-1]
            value = EXPECTED[gauge.key]
            shown = None if value is None else float(f"{value:.5g}")
            assert (last["step"], last["value"]) == (STEPS[-1], shown), gauge.key
    assert [(row["step"], row["value"]) for row in page.rows("c-growth") if row["run"] == "one"] == [
        (STEPS[0], 1.5), (STEPS[-1], None),
    ]  # fmt: skip

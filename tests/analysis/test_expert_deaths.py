from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loopscope import open_run
from loopscope.analysis import Run, expert_deaths
from loopscope.analysis.expert_deaths import _stretches
from loopscope.errors import ConfigError
from loopscope.store import RunStore, StoreOptions

OPTIONS = StoreOptions(tick_s=3600.0, seal_in="thread", on_error="raise")


def written(path: Path, rows: list[dict[str, Any]]) -> Run:
    store = RunStore.create(path, options=OPTIONS)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for row in rows:
        writer.append("router", {"aggregation_scope": "global", "num_experts": 4, **row})
    store.close()
    return open_run(path)


def loop(step: int, counts: list[int], *, loop_step: int = 0) -> dict[str, Any]:
    return {
        "step": step, "block": "loop", "unrolled_pos": 1 + loop_step, "loop_step": loop_step, "layer_idx": 0,
        "expert_count": counts,
    }  # fmt: skip


def test_the_dead_have_a_place_and_a_time(tmp_path: Path) -> None:
    alive, three, one = [20, 20, 20, 20], [27, 27, 26, 0], [80, 0, 0, 0]
    counts = {10: alive, 20: three, 30: three, 40: one, 50: three, 60: alive, 70: three}
    # The second loop step is well, and written before the first: order is by step, not by writing.
    rows = [loop(s, alive, loop_step=1) for s in counts] + [loop(s, c) for s, c in reversed(counts.items())]
    run = written(tmp_path / "run", rows)
    found = expert_deaths(run, expected=60).to_pylist()
    place = {"block": "loop", "loop_step": 0, "layer_idx": 0, "num_experts": 4}
    assert found == [{**place, "expert": 3, "since": 20, "until": 60, "traces": 4, "due": 80.0}]
    # One trace of 20 due assignments is not beyond chance at 100, and is at 20; the last one lasts.
    assert expert_deaths(run).num_rows == 0
    shorter = [
        (r["expert"], r["since"], r["until"], r["due"]) for r in expert_deaths(run, expected=20).to_pylist()
    ]
    assert shorter == [(3, 20, 60, 80.0), (1, 40, 50, 20.0), (2, 40, 50, 20.0), (3, 70, None, 20.0)]


def test_a_tail_layer_is_known_by_its_place_in_the_tail_when_the_depth_varies(tmp_path: Path) -> None:
    rows = []
    for step, loops in ((1, 2), (2, 5), (3, 3)):
        rows += [loop(step, [100, 100, 100, 100], loop_step=r) for r in range(loops)]
        for layer, counts in enumerate(([200, 200, 0, 0], [100, 100, 100, 100])):
            pos = 1 + loops + layer
            rows.append({"step": step, "block": "tail", "unrolled_pos": pos, "expert_count": counts})
    found = expert_deaths(written(tmp_path / "run", rows)).to_pylist()
    assert [(r["block"], r["loop_step"], r["layer_idx"], r["expert"]) for r in found] == [
        ("tail", None, 0, 2), ("tail", None, 0, 3),
    ]  # fmt: skip
    assert {(r["since"], r["until"], r["traces"], r["due"]) for r in found} == {(1, None, 3, 300.0)}


def test_no_trace_no_death(tmp_path: Path) -> None:
    assert expert_deaths(written(tmp_path / "run", [])).num_rows == 0


@pytest.mark.parametrize("expected", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_none_is_refused(tmp_path: Path, expected: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        expert_deaths(written(tmp_path / "run", []), expected=expected)


@settings(deadline=None, max_examples=100)
@example(counts=[[0, 0, 1], [0, 0, 7], [0, 0, 7], [0, 0, 1], [0, 1, 0], [7, 7, 0]], expected=5.0)
@given(
    st.integers(1, 4).flatmap(
        lambda experts: st.lists(
            st.lists(st.sampled_from([0, 0, 1, 7]), min_size=experts, max_size=experts),
            min_size=1,
            max_size=12,
        )
    ),
    st.sampled_from([0.5, 1.0, 5.0]),
)
def test_stretches_are_those_that_a_walk_finds(counts: list[list[int]], expected: float) -> None:
    steps = [3 * index + 1 for index in range(len(counts))]
    walked = []
    for expert in range(len(counts[0])):
        begin: int | None = None
        for index in range(len(counts) + 1):
            silent = index < len(counts) and counts[index][expert] == 0
            if silent and begin is None:
                begin = index
            elif not silent and begin is not None:
                due = sum(map(sum, counts[begin:index])) / len(counts[0])
                if due >= expected:
                    until = steps[index] if index < len(counts) else None
                    walked.append((expert, steps[begin], until, index - begin, pytest.approx(due)))
                begin = None
    found = _stretches(np.array(steps), np.array(counts), expected)
    assert [(r["expert"], r["since"], r["until"], r["traces"], r["due"]) for r in found] == walked

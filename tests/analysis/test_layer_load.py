from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscope import open_run
from loopscope.analysis import Run, layer_load
from loopscope.analysis.layer_load import _mutual_information
from loopscope.store import RunStore, StoreOptions

OPTIONS = StoreOptions(tick_s=3600.0, seal_in="thread", on_error="raise")


def written(path: Path, rows: list[dict[str, Any]], *, seal: bool = True) -> Run:
    store = RunStore.create(path, options=OPTIONS)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for row in rows:
        writer.append("router", {"aggregation_scope": "global", **row})
    store.close(seal=seal)
    return open_run(path)


def visit(step: int, loop_step: int, layer: int, counts: list[int] | None, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "block": "loop", "unrolled_pos": 1 + 2 * loop_step + layer, "loop_step": loop_step,
        "layer_idx": layer, "num_experts": 3, "top_k": 1, "expert_count": counts, **more,
    }  # fmt: skip


@pytest.mark.parametrize("seal", [True, False])
def test_loop_steps_are_added_up_and_layers_are_not(tmp_path: Path, seal: bool) -> None:
    rows = [
        visit(1, 1, 0, [0, 4, 0]), visit(1, 0, 0, [4, 0, 0]), visit(1, 0, 1, [2, 1, 1]), visit(1, 1, 1, [2, 1, 1]),
        {**visit(1, 0, 0, [9, 9, 9]), "block": "head", "loop_step": None, "layer_idx": None, "unrolled_pos": 0},
        # Not counted (non-finite logits), and a rank's own row beside the global one.
        visit(2, 0, 0, None), visit(2, 1, 0, [1, 1, 2]),
        visit(2, 1, 0, [7, 0, 0], aggregation_scope="rank_local", rank=0),
    ]  # fmt: skip
    found = layer_load(written(tmp_path / "run", rows, seal=seal)).to_pylist()
    assert [(r["step"], r["layer_idx"], r["num_loop_steps"]) for r in found] == [
        (1, 0, 2),
        (1, 1, 2),
        (2, 0, 1),
    ]
    assert [r["expert_count"] for r in found] == [[4, 4, 0], [4, 2, 2], [1, 1, 2]]
    assert found[0]["load"] == [[4, 0, 0], [0, 4, 0]]
    assert [r["dead_everywhere"] for r in found] == [[2], [], []]
    # The loop step tells the expert, and the other way round: ln 2. The same loads in both: nothing.
    assert [r["loop_mutual_information"] for r in found] == pytest.approx([math.log(2), 0.0, 0.0], abs=1e-12)
    assert (found[0]["num_experts"], found[0]["top_k"]) == (3, 1)


def test_a_run_without_a_traced_loop_has_no_row(tmp_path: Path) -> None:
    empty = layer_load(written(tmp_path / "none", []))
    assert (empty.num_rows, "load" in empty.column_names) == (0, True)
    head = {
        "step": 1,
        "block": "head",
        "unrolled_pos": 0,
        "num_experts": 3,
        "top_k": 1,
        "expert_count": [1, 2, 3],
    }
    assert layer_load(written(tmp_path / "head", [head])).num_rows == 0


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 5).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(0, 50), min_size=experts, max_size=experts), min_size=1, max_size=5
        )
    )
)
def test_mutual_information_is_what_the_entropies_say(counts: list[list[int]]) -> None:
    found = _mutual_information(np.array(counts))
    total = sum(map(sum, counts))
    if total == 0:
        assert found is None
        return
    joint = np.array(counts) / total
    entropies = (scipy.stats.entropy(p) for p in (joint.sum(axis=0), joint.sum(axis=1), joint.flatten()))
    expert, loop_step, both = entropies
    assert found == pytest.approx(max(0.0, expert + loop_step - both), abs=1e-9)

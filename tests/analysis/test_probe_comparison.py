"""Probes compare where they ran over the same tokens, and nowhere else."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from loopscope.analysis import compare_probes, open_run, require_same_corpus
from loopscope.errors import ConfigError, ProbeError
from loopscope.store import RunStore


def probed(path: Path, losses: dict[int, float], corpus: str = "a" * 64):
    store = RunStore.create(path)
    attempt = store.claim_attempt(first_step=1, world_size=1).attempt
    writer = store.writer(attempt=attempt, writer="r00000")
    for step, loss in losses.items():
        for kind, stratum, extra in (("all", "all", 0.0), ("repetition", "low", 1.0)):
            row = {
                "step": step,
                "run_id": store.run_id,
                "attempt": attempt,
                "aggregation_scope": "rank_local",
                "rank": 0,
                "wall_time": datetime.now(UTC),
                "corpus_name": "core",
                "corpus_hash": corpus,
                "stratum_kind": kind,
                "stratum": stratum,
                "loss_mean": loss + extra,
            }
            writer.append("probe_loss", row)
    writer.close()
    store.close()
    return open_run(path)


def test_the_change_of_every_stratum(tmp_path: Path) -> None:
    first, second = probed(tmp_path / "a", {0: 4.0, 5: 3.0}), probed(tmp_path / "b", {0: 4.0, 9: 2.5})
    rows = compare_probes(first, second).to_pylist()
    assert [(row["stratum"], row["first"], row["second"], row["change"]) for row in rows] == [
        ("all", 3.0, 2.5, -0.5),
        ("low", 4.0, 3.5, -0.5),
    ]
    within = compare_probes(first, first, first_step=0).to_pylist()
    assert [row["change"] for row in within] == [-1.0, -1.0]


def test_different_tokens_are_refused_with_both_hashes(tmp_path: Path) -> None:
    first, second = probed(tmp_path / "a", {0: 4.0}), probed(tmp_path / "b", {0: 4.0}, corpus="b" * 64)
    with pytest.raises(ProbeError, match=f"{'a' * 64} on one side, {'b' * 64} on the other"):
        compare_probes(first, second)


def test_hashes_of_one_side_alone() -> None:
    assert require_same_corpus(["x", "x"], ["x"]) == "x"
    for first, second in (([], ["x"]), (["x", "y"], ["x"])):
        with pytest.raises(ProbeError):
            require_same_corpus(first, second)


def test_what_is_not_there(tmp_path: Path) -> None:
    run = probed(tmp_path / "a", {0: 4.0})
    with pytest.raises(ConfigError, match="table is 'loss'"):
        compare_probes(run, run, "loss")
    with pytest.raises(ProbeError, match="no row of probe_overlap"):
        compare_probes(run, run, "probe_overlap")
    with pytest.raises(ProbeError, match="no probe at step 3"):
        compare_probes(run, run, first_step=3)
    with pytest.raises(ProbeError, match="no row of probe_loss"):
        compare_probes(run, run, corpus_hash="c" * 64)

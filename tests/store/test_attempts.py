from __future__ import annotations

from pathlib import Path

import pytest
from store_runs import QUIET, loss, visit, write_attempt

from loopscope import open_run
from loopscope.errors import ConfigError, StoreError
from loopscope.store import Attempt, LiveRange, RunReader, RunStore, live_ranges
from loopscope.store.read.verify import verify_run


def attempts(*specs: tuple[int, int | None]) -> list[Attempt]:
    return [Attempt(attempt=n, first_step=f, parent_attempt=p) for n, (f, p) in enumerate(specs, 1)]


def test_one_attempt_is_live_from_the_probe_before_step_one() -> None:
    assert live_ranges(attempts((1, None)), {1}) == {1: LiveRange(0, None)}


def test_a_resume_replaces_what_lies_behind_the_checkpoint() -> None:
    assert live_ranges(attempts((1, None), (101, 1)), {1, 2}) == {
        1: LiveRange(0, 101),
        2: LiveRange(101, None),
    }


def test_an_attempt_that_dies_before_its_first_row_takes_no_history_along() -> None:
    # 1–150, resume at 101 dies without a row, resume at 151.
    chain = attempts((1, None), (101, 1), (151, 1))
    assert live_ranges(chain, {1, 3}) == {1: LiveRange(0, 151), 3: LiveRange(151, None)}
    assert live_ranges(chain[:2], {1}) == {1: LiveRange(0, None)}


def test_a_grandparent_ends_where_the_earliest_descendant_starts() -> None:
    chain = attempts((1, None), (101, 1), (151, 2), (81, 1))
    assert live_ranges(chain, {1, 2, 3, 4}) == {1: LiveRange(0, 81), 4: LiveRange(81, None)}
    # An empty attempt in the chain passes the end on.
    assert live_ranges(attempts((1, None), (101, 1), (101, 2)), {1, 3}) == {
        1: LiveRange(0, 101), 2: LiveRange(101, 101), 3: LiveRange(101, None),
    }  # fmt: skip


def test_a_fresh_start_replaces_everything() -> None:
    assert live_ranges(attempts((1, None), (1, None)), {1, 2}) == {2: LiveRange(0, None)}


def test_no_rows_no_live_rows() -> None:
    assert live_ranges(attempts((1, None)), set()) == {}


def test_a_chain_that_bites_its_tail_ends() -> None:
    assert set(live_ranges(attempts((1, 2), (5, 1)), {1, 2})) == {1, 2}


@pytest.mark.parametrize("seal", [True, False])
def test_a_run_that_has_events_alone_shows_them(tmp_path: Path, seal: bool) -> None:
    root = tmp_path / "run"
    store = RunStore.create(root, options=QUIET)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    writer.append(
        "health",
        {"step": 1, "aggregation_scope": "global", "event": "no_trace", "severity": "critical"},
    )
    store.close(seal=seal)
    assert open_run(root).arrow("health")["event"].to_pylist() == ["no_trace"]
    assert not verify_run(root).problems
    # As soon as an attempt has a row of training, one that has none no longer stands for the run.
    write_attempt(root, range(1, 3))
    assert not open_run(root).arrow("health").num_rows


def test_superseded_rows_are_kept_and_not_live(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 151), value=1.0)
    write_attempt(root, range(101, 121), parent=1, value=2.0)
    reader = RunReader(root)
    rows = {r["step"]: r["task_loss"] for r in reader.read("loss").to_pylist()}
    assert rows == {**dict.fromkeys(range(1, 101), 1.0), **dict.fromkeys(range(101, 121), 2.0)}
    assert reader.read("loss", live=False).num_rows == 170
    assert verify_run(root).problems == []


def test_health_rows_alone_do_not_make_an_attempt_the_newest(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 11))
    with RunStore.open(root, options=QUIET) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=6, parent_attempt=1))
        writer.append("health", {"step": 5, "event": "resumed"})
    assert RunReader(root).read("loss").num_rows == 10
    assert verify_run(root).problems == []


def test_an_elastic_restart_with_fewer_ranks_replaces_every_rank(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for ranks, steps, parent in ((4, range(1, 11), None), (2, range(6, 9), 1)):
        store = (RunStore.open if parent else RunStore.create)(root, options=QUIET)
        attempt = store.claim_attempt(first_step=steps.start, parent_attempt=parent, world_size=ranks)
        writers = [store.writer(attempt=attempt.attempt, writer=f"r{r}") for r in range(ranks)]
        for step in steps:
            for rank, writer in enumerate(writers):
                writer.append("router", visit(step, 0, rank=rank, world_size=ranks))
        store.close()
    live = RunReader(root).read("router").to_pylist()
    got = sorted((r["step"], r["rank"], r["world_size"]) for r in live)
    expected = [(s, r, 4) for s in range(1, 6) for r in range(4)] + [
        (s, r, 2) for s in range(6, 9) for r in range(2)
    ]
    assert got == sorted(expected)
    assert verify_run(root).problems == []


def test_numbers_are_claimed_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for expected in (1, 2, 3):
        with (RunStore.create if expected == 1 else RunStore.open)(root, options=QUIET) as store:
            assert store.claim_attempt(first_step=1).attempt == expected
    # A claim that died half-way leaves a number that is never used again.
    (root / "attempts" / "00004.json").write_text("")
    with RunStore.open(root, options=QUIET) as store:
        assert store.claim_attempt(first_step=1).attempt == 5
    assert [p.where for p in RunReader(root).check_all()] == ["attempts"]


def test_wrong_claims_are_refused(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run", options=QUIET) as store:
        with pytest.raises(ConfigError, match="parent_attempt is 7"):
            store.claim_attempt(first_step=1, parent_attempt=7)
        with pytest.raises(ConfigError, match="first_step is -1"):
            store.claim_attempt(first_step=-1)
        with pytest.raises(StoreError, match="attempt 3 of run"):
            store.writer(attempt=3)
        attempt = store.claim_attempt(first_step=1)
        with pytest.raises(ConfigError, match="expected 1 to 64 letters"):
            store.writer(attempt=attempt, writer="rank-0/..")


def test_a_flipped_attempt_file_falls_back_to_the_manifest(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 21))
    write_attempt(root, range(11, 16), parent=1)
    path = root / "attempts" / "00002.json"
    path.write_text(path.read_text().replace('"first_step":11', '"first_step":19'))
    reader = RunReader(root)
    assert reader.live == {1: LiveRange(0, 11), 2: LiveRange(11, None)}
    assert "CRC-32" in str(reader.problems[0])


def test_a_writer_that_opens_again_uses_new_files(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", options=QUIET)
    attempt = store.claim_attempt(first_step=1)
    for step in (1, 2, 3):
        writer = store.writer(attempt=attempt)
        writer.append("loss", loss(step))
        writer.close(seal=step != 2)
    store.close()
    assert RunReader(tmp_path / "run").read("loss")["step"].to_pylist() == [1, 2, 3]
    assert verify_run(tmp_path / "run").problems == []

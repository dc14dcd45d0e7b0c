"""A run that is killed and resumed from a checkpoint: every step live once, nothing deleted."""

import json

import pytest

import loopscope
from loopscope.errors import CheckpointMismatchError

pytestmark = pytest.mark.ranks

BASE = {
    "steps": 12,
    "checkpoint_every": 5,
    "loopscope": {"trace_every": 1, "probe_every": 4, "on_error": "raise", "per_rank": True},
}


@pytest.fixture(scope="module")
def story(trainings, tmp_path_factory):
    """(folder, what the killed run looked like, how the resumed and an uninterrupted run ended)."""
    folder = tmp_path_factory.mktemp("story") / "run"
    killed = {**BASE, "name": "killed", "out": str(folder), "kill_after": 8}
    trainings([killed], ranks=2, killed=True, torchrun=True)
    run = loopscope.open_run(folder)
    after_kill = run.sql("select step from loss where rank is null order by step").fetchall()
    resumed = {**BASE, "name": "resumed", "out": str(folder)}
    resumed["loopscope"] = {**BASE["loopscope"], "resume": True}
    ended = trainings([resumed, {**BASE, "name": "whole"}], ranks=2)
    return folder, after_kill, ended


def test_the_killed_run_opens_with_all_but_the_last_losses(story):
    """A loss is read some steps late, at a traced step at the latest; here each was traced, so one may be lost."""
    _, after_kill, _ = story
    assert after_kill in ([(step,) for step in range(1, n)] for n in (8, 9))


def test_steps_are_contiguous_and_live_once(story):
    run = loopscope.open_run(story[0])
    for scope in ("rank is null", "rank = 0", "rank = 1"):
        steps = run.sql(
            f"select step, attempt from router where {scope} and unrolled_pos = 0 order by 1"
        ).fetchall()
        assert steps == [(step, 1 if step <= 5 else 2) for step in range(1, 13)]
    losses = run.sql("select step, attempt from loss where rank is null order by 1").fetchall()
    assert losses == [(step, 1 if step <= 5 else 2) for step in range(1, 13)]
    assert run.sql("select distinct step from probe_loss order by 1").fetchall() == [(0,), (4,), (8,), (12,)]


def test_rolled_back_rows_are_kept_but_not_live(story):
    run = loopscope.open_run(story[0])
    rows = run.arrow("loss", live=False).to_pylist()
    superseded = sorted(r["step"] for r in rows if r["attempt"] == 1 and r["step"] > 5 and r["rank"] is None)
    assert superseded in ([6, 7], [6, 7, 8])


def test_the_attempts_say_what_happened(story):
    run = loopscope.open_run(story[0])
    rows = run.sql(
        "select attempt, parent_attempt, first_step, live_from, live_to, world_size from attempt order by 1"
    )
    assert rows.fetchall() == [(1, None, 1, 0, 6, 2), (2, 1, 6, 6, None, 2)]
    assert run.problems == []


def test_the_resumed_run_ends_as_the_uninterrupted_one(story):
    _, _, ended = story
    for rank in range(2):
        for key in ("parameters", "optimizer"):
            assert ended["resumed"][rank][key] == ended["whole"][rank][key]
        assert ended["resumed"][rank]["objectives"] == ended["whole"][rank]["objectives"][5:]


def test_a_checkpoint_of_another_run_is_refused(story, trainings):
    folder, _, ended = story
    other = ended.root / "whole"
    manifest = json.loads((other / "run.json").read_text())
    scope = loopscope.Loopscope(loopscope.Loopscope.Config(out=folder, resume=True))
    scope.open(expected_visits=())
    with pytest.raises(CheckpointMismatchError) as caught:
        scope.begin_attempt(first_step=6, parent_run_id=manifest["run_id"], parent_attempt=1)
    assert manifest["run_id"] in str(caught.value)
    assert str(folder) in str(caught.value)

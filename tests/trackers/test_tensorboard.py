"""Event files of TensorBoard, read back with TensorBoard's own reader."""

import pytest
from test_wandb import NOTICE
from toy_run import train
from tracker_helpers import events

from loopscope import Loopscope, open_run
from loopscope.trackers.visits import DISTRIBUTIONS


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    out = tmp_path_factory.mktemp("rolled") / "run"
    train(out, last=12, probe_at=(6,), trackers=("tensorboard",), on_error="raise")
    train(out, first=8, last=15, probe_at=(9,), trackers=("tensorboard",), on_error="raise")
    return out


def text(found, tag, at=-1):
    return found.Tensors(f"{tag}/text_summary")[at].tensor_proto.string_val[0].decode()


def test_values_are_those_of_the_live_rows(rolled_back):
    found, run = events(rolled_back / "tensorboard"), open_run(rolled_back)
    for key, sql in {
        "loss/task": "select step, task_loss from loss order by 1",
        "moe/maxvio_max": "select step, max(maxvio_count) from router group by 1 order by 1",
        "loopscope/attempt": "select step, attempt from loss order by 1",
    }.items():
        # A probe's values come by themselves, with the number of the attempt once more.
        seen = sorted({event.step: event.value for event in found.Scalars(key)}.items())
        expected = run.sql(sql).fetchall()
        assert [step for step, _ in seen] == [step for step, _ in expected]
        assert [value for _, value in seen] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_the_spread_over_visits_is_three_histograms(rolled_back):
    found = events(rolled_back / "tensorboard")
    assert found.Tags()["histograms"] == [f"visits/{name}" for name in DISTRIBUTIONS]
    last = found.Histograms("visits/maxvio_count")[-1]
    (numbers,) = zip(
        *open_run(rolled_back).sql("select maxvio_count from router where step = 15").fetchall(), strict=True
    )
    value = last.histogram_value
    assert (last.step, value.num, value.min, value.max) == (15, len(numbers), min(numbers), max(numbers))


def test_tables_are_text(rolled_back):
    table = text(events(rolled_back / "tensorboard"), "loopscope/visits")
    head, _, *rows = table.splitlines()
    assert head.startswith("| step | visit | block | unrolled_pos | loop_step | layer_idx |")
    assert len(rows) == 8
    assert rows[0].startswith("| 15 | head 0 | head | 0 | – | – |")


def test_few_tags(rolled_back):
    tags = events(rolled_back / "tensorboard").Tags()
    assert len(tags["scalars"]) + len(tags["histograms"]) + len(tags["tensors"]) <= 60


def test_the_run_says_which_it_is(rolled_back):
    about = text(events(rolled_back / "tensorboard"), "loopscope/run")
    assert f"| run_id | {open_run(rolled_back).run_id} |" in about
    assert "| attempt | 2 |" in about


def test_an_alert_is_a_text_at_its_step(tmp_path):
    with Loopscope(
        Loopscope.Config(out=tmp_path / "run", trackers=("tensorboard",), on_error="raise")
    ) as scope:
        scope.open(expected_visits=())
        scope.begin_attempt()
        scope.trackers.alert(NOTICE)
    found = events(tmp_path / "run" / "tensorboard")
    assert found.Tensors("loopscope/alerts/text_summary")[0].step == 40
    assert text(found, "loopscope/alerts").startswith("**critical: One expert is far over its share**")
    assert "loop 2/1, since step 20: MaxVio 6 > 4.2" in text(found, "loopscope/alerts")


def test_a_writer_of_the_trainers_is_written_into_and_left_open(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    theirs = SummaryWriter(str(tmp_path / "theirs"))
    share = lambda scope: scope.share_trackers({"tensorboard": theirs})  # noqa: E731
    train(tmp_path / "run", last=3, trackers=("tensorboard",), on_error="raise", prepare=share)
    theirs.add_scalar("after", 1.0, 4)
    theirs.close()
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert (
        len(list((tmp_path / "theirs").iterdir())) == 1
    )  # one event file: TensorBoard follows only the newest
    found = events(tmp_path / "theirs")
    assert [event.step for event in found.Scalars("loss/task")] == [1, 2, 3]
    assert found.Scalars("after")

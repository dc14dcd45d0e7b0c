import pytest
import torch

from loopscope import Loopscope, LossComponents, open_run
from loopscope.collect import ProbeCorpus
from loopscope.errors import CheckpointMismatchError, NotARunError, RunExistsError, TraceError
from loopscope.models.toy import ToyLoopMoE
from loopscope.session import LoopscopeConfig
from loopscope.trace import ACTIVE_TRACE_SINK, run_probe_forward

LOSS = LossComponents(
    task_loss=2.0, lb_loss=1.0, lb_loss_factor=0.0, z_loss=0.0, z_loss_factor=0.0, total_loss=2.0
)


def _model():
    torch.manual_seed(0)
    return ToyLoopMoE(vocab_size=11, width=8)


def _traced(model, collector, step):
    window = ACTIVE_TRACE_SINK.arm()
    try:
        with torch.no_grad():
            model(torch.arange(12).remainder(11).reshape(2, 6))
    finally:
        ACTIVE_TRACE_SINK.disarm()
    return collector.on_trace_step(step, window, model.trace_meta())


class _Corpus:
    name, corpus_hash, strata = "tiny", "abc", {"domain": ("a", "b")}


class _Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.trace_meta = model.trace_meta

    def forward(self, ids):
        return self.model(ids)[0]


def test_the_configuration_is_reached_through_loopscope():
    assert Loopscope.Config is LoopscopeConfig


def test_a_plain_loop_leaves_every_table(tmp_path):
    model = _model()
    with Loopscope(Loopscope.Config(out=tmp_path / "run", on_error="raise")) as scope:
        collector = scope.start(model)
        scope.use_corpus(_Corpus())
        for step in (1, 2):
            scope.begin_step(step, tokens_seen=12 * step)
            _traced(model, collector, step)
            collector.on_metrics_step(step, LOSS)
        ids = torch.arange(12).remainder(11).reshape(2, 6)
        run_probe_forward(_Logits(model), ids, collector=collector, step=2)
        assert collector.dropped == 0
    run = open_run(tmp_path / "run")
    visits = len(model.expected_visits())
    assert run.arrow("loss").column("step").to_pylist() == [1, 2]
    assert run.arrow("router").num_rows == run.arrow("residual").num_rows == 2 * visits
    assert run.arrow("transition").num_rows > 0
    assert run.arrow("probe_router").num_rows == visits
    assert run.arrow("probe_loss").num_rows == 3
    coverage = [r for r in run.arrow("health").to_pylist() if r["event"] == "coverage"]
    assert [row["value"] for row in coverage] == [1.0, 1.0]
    assert {row["run_id"] for row in run.arrow("router").to_pylist()} == {scope_id(run)}
    assert len(run.manifest.expected_visits) == visits
    assert run.manifest.trace_meta["num_stacks"] == 3
    assert run.manifest.configuration["loopscope"]["trace_every"] == 10


def scope_id(run):
    return run.manifest.run_id


def test_out_that_holds_another_run(tmp_path):
    with Loopscope(Loopscope.Config(out=tmp_path)) as scope:
        scope.start(_model())
    with pytest.raises(RunExistsError, match=r"already holds run"):
        Loopscope(Loopscope.Config(out=tmp_path)).start(_model())


def test_resume_without_a_run(tmp_path):
    with pytest.raises(NotARunError):
        Loopscope(Loopscope.Config(out=tmp_path / "none", resume=True)).start(_model())


def test_resume_continues_the_run_as_a_new_attempt(tmp_path):
    model = _model()
    with Loopscope(Loopscope.Config(out=tmp_path)) as first:
        collector = first.start(model)
        run_id = first.run_id
        for step in (1, 2, 3):
            collector.on_metrics_step(step, LOSS)
    second = Loopscope(Loopscope.Config(out=tmp_path, resume=True))
    second.open(expected_visits=model.expected_visits(), meta=model.trace_meta())
    collector = second.begin_attempt(first_step=3, parent_run_id=run_id, parent_attempt=1)
    assert (second.run_id, second.attempt) == (run_id, 2)
    for step in (3, 4):
        collector.on_metrics_step(step, LOSS)
    second.close()
    run = open_run(tmp_path)
    rows = [(row["step"], row["attempt"]) for row in run.arrow("loss").to_pylist()]
    assert sorted(rows) == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_resume_with_a_checkpoint_of_another_run(tmp_path):
    model = _model()
    with Loopscope(Loopscope.Config(out=tmp_path)) as first:
        first.start(model)
    second = Loopscope(Loopscope.Config(out=tmp_path, resume=True))
    second.open(expected_visits=model.expected_visits())
    with pytest.raises(CheckpointMismatchError, match="the checkpoint belongs to run other"):
        second.begin_attempt(first_step=3, parent_run_id="other", parent_attempt=1)
    second.close()


def test_a_branch_is_a_run_of_its_own_that_names_its_parent(tmp_path):
    scope = Loopscope(Loopscope.Config(out=tmp_path))
    scope.open(expected_visits=_model().expected_visits())
    scope.use_corpus(_Corpus())
    scope.begin_attempt(first_step=7, parent_run_id="other", parent_attempt=4)
    scope.close()
    manifest = open_run(tmp_path).manifest
    assert (manifest.parent_run_id, manifest.parent_step) == ("other", 6)
    assert manifest.corpora == {"tiny": "abc"}
    assert manifest.attempts[0].parent_attempt is None


def test_ranks_share_run_and_attempt_and_write_apart(tmp_path):
    """Two sessions in one process: `decide` replays rank 0's answers for rank 1."""
    model, answers = _model(), []

    def decide_zero(make):
        answers.append(make())
        return answers[-1]

    scopes = []
    for rank in (0, 1):
        scope = Loopscope(Loopscope.Config(out=tmp_path, on_error="raise"))
        replay = iter(list(answers))
        decide = decide_zero if rank == 0 else lambda make, replay=replay: next(replay)
        scope.open(expected_visits=model.expected_visits(), rank=rank, world_size=2, decide=decide)
        scope.begin_attempt()
        scopes.append(scope)
    for scope in scopes:
        _traced(model, scope.collector, 1)
    for scope in reversed(scopes):
        scope.close()
    rows = open_run(tmp_path).arrow("router").to_pylist()
    assert {row["rank"] for row in rows} == {0, 1}
    assert {row["attempt"] for row in rows} == {1}
    assert len(rows) == 2 * len(model.expected_visits())


def test_before_open(tmp_path):
    scope = Loopscope(Loopscope.Config(out=tmp_path / "run"))
    with pytest.raises(TraceError, match="not open"):
        scope.begin_attempt()
    scope.flush()
    scope.close()
    assert not (tmp_path / "run").exists()


def test_a_corpus_may_come_after_the_attempt_began(tmp_path):
    with Loopscope(Loopscope.Config(out=tmp_path)) as scope:
        collector = scope.start(_model())
        scope.use_corpus(_Corpus())
        assert collector.corpus == ProbeCorpus(name="tiny", hash="abc", strata={"domain": ("a", "b")})

"""Probes change no bit of a training: precisions, recompute, compiled blocks, odd modules, failures, kills."""

import pytest

import loopscope as package

pytestmark = pytest.mark.ranks

COMPARED = ("objectives", "parameters", "buffers", "optimizer", "dataloader", "rng")
QUIET = {"trace_every": 0, "probe_every": 0, "on_error": "raise"}
PROBED = {"trace_every": 0, "probe_every": 1, "on_error": "raise", "probe_batch_size": 7}
RECORDED = {**PROBED, "on_error": "record"}
CONFIGURATIONS = {
    "fp32": {},
    "bf16-recompute-dropout": {"dtype": "bfloat16", "recompute": "full", "model": {"dropout": 0.1}},
    "bf16-compiled-dropout": {"dtype": "bfloat16", "compile": "aot_eager", "model": {"dropout": 0.1}},
    "habits": {"hook": "probe_hooks", "habits": True, "model": {"dropout": 0.1}},
}
STEPS = 12


def _scenarios():
    found = []
    for name, configuration in CONFIGURATIONS.items():
        base = {**configuration, "steps": STEPS, "probe_steps": [3, 7]}
        found.append({**base, "name": f"{name}-plain", "loopscope": QUIET})
        found.append({**base, "name": f"{name}-probed", "loopscope": PROBED})
    return found


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def matrix(request, trainings):
    return trainings(_scenarios(), request.param)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_run_ends_bit_for_bit_as_without(matrix, name):
    probes = matrix.run(f"{name}-probed").sql("select distinct step from probe_loss order by step")
    assert probes.fetchall() == [(3,), (7,)]
    for rank in range(matrix.ranks):
        plain, probed = matrix[f"{name}-plain"][rank], matrix[f"{name}-probed"][rank]
        assert len(plain["objectives"]) == STEPS
        assert {key: probed[key] for key in COMPARED} == {key: plain[key] for key in COMPARED}


def test_a_probe_adds_no_graph(matrix):
    for rank in range(matrix.ranks):
        plain, probed = (matrix[f"bf16-compiled-dropout-{kind}"][rank] for kind in ("plain", "probed"))
        assert probed["graphs"] == plain["graphs"] > 0
        assert probed["graph_breaks"] == plain["graph_breaks"]


@pytest.fixture(scope="module")
def failures(trainings):
    base = {"steps": 6, "model": {"dropout": 0.1}, "hook": "probe_hooks", "probe_steps": [2, 4]}
    return trainings(
        [
            {**base, "name": "plain", "loopscope": QUIET},
            {**base, "name": "writer-fails", "loopscope": RECORDED, "fail_on_rank": 0},
            {**base, "name": "other-fails", "loopscope": RECORDED, "fail_on_rank": 1},
            {**base, "name": "interrupted", "loopscope": PROBED, "interrupt_in_probe": 4},
        ],
        2,
    )


@pytest.mark.parametrize("name", ["writer-fails", "other-fails", "interrupted"])
def test_a_failure_on_one_rank_or_an_interrupt_changes_no_bit(failures, name):
    for rank in range(2):
        plain, probed = failures["plain"][rank], failures[name][rank]
        assert {key: probed[key] for key in COMPARED} == {key: plain[key] for key in COMPARED}


def test_a_probe_that_failed_is_in_the_health_table(failures):
    query = "select step, detail from health where event = 'probe_failed' order by step"
    rows = failures.run("writer-fails").sql(query).fetchall()
    assert [step for step, _ in rows] == [2, 4]
    assert "failed on purpose" in rows[0][1]
    assert failures.run("other-fails").sql("select distinct step from probe_loss").fetchall() != []


def test_killed_in_a_probe_and_resumed(trainings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "run"
    loopscope = {**PROBED, "probe_every": 2}
    base = {"steps": 8, "checkpoint_every": 3, "hook": "probe_hooks", "model": {"dropout": 0.0}}
    killed = {**base, "name": "killed", "out": str(folder), "loopscope": loopscope, "kill_in_probe": 6}
    trainings([killed], 2, killed=True)
    resumed = {**base, "name": "resumed", "out": str(folder), "loopscope": {**loopscope, "resume": True}}
    ended = trainings([resumed, {**base, "name": "whole", "loopscope": loopscope}], 2)
    for rank in range(2):
        for key in ("parameters", "buffers", "optimizer"):
            assert ended["resumed"][rank][key] == ended["whole"][rank][key], key
        assert ended["resumed"][rank]["objectives"] == ended["whole"][rank]["objectives"][3:]
    query = "select step, loss_mean from probe_loss where stratum_kind = 'all' order by step"
    assert package.open_run(folder).sql(query).fetchall() == ended.run("whole").sql(query).fetchall()

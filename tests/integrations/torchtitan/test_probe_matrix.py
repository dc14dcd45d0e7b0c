"""Watching changes no bit of a training: precisions, recompute, compiled blocks, odd modules, failures, kills."""

import itertools

import pytest

import loopscope as package

# Twelve trainings share a process per rank: on a machine that does other things too they take their time.
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

COMPARED = ("objectives", "parameters", "buffers", "optimizer", "dataloader", "rng")
QUIET = {"trace_every": 0, "probe_every": 0, "on_error": "raise"}
PROBED = {"trace_every": 0, "probe_every": 1, "on_error": "raise", "probe_batch_size": 7}
WATCHED = {
    "traced": {"trace_every": 1, "probe_every": 0, "on_error": "raise"},
    "both": {"trace_every": 2, "probe_every": 1, "on_error": "raise"},
}
RECORDED = {**PROBED, "on_error": "record"}
FACTORS = {
    "dropout": (0.0, 0.1),
    "dtype": ("float32", "bfloat16"),
    "recompute": ("none", "selective", "full"),
    "compile": (None, "aot_eager"),
}
# With every value of a factor meets every value of every other one; `scripts/bench isolation` runs the whole product.
COVER = (
    (0.1, "float32", "none", None),
    (0.0, "bfloat16", "none", "aot_eager"),
    (0.0, "float32", "selective", "aot_eager"),
    (0.1, "bfloat16", "selective", None),
    (0.0, "bfloat16", "full", None),
    (0.1, "float32", "full", "aot_eager"),
)


def _configuration(dropout, dtype, recompute, compiled):
    found = {"model": {"dropout": dropout}, "dtype": dtype, "recompute": recompute}
    return found if compiled is None else {**found, "compile": compiled}


CONFIGURATIONS = {"-".join(map(str, values)): _configuration(*values) for values in COVER}
# One of them also has modules with habits: a generator of their own, a submodule in eval, counters, a loader.
CONFIGURATIONS["0.1-bfloat16-selective-None"] |= {"hook": "probe_hooks", "habits": True}
COMPILED = [name for name, configuration in CONFIGURATIONS.items() if "compile" in configuration]
STEPS = 12
# The simplest of them is also traced, alone and beside probes; its dropout makes the forward random.
SIMPLEST = "0.1-float32-none-None"


def _scenarios():
    found = []
    for name, configuration in CONFIGURATIONS.items():
        base = {**configuration, "steps": STEPS, "probe_steps": [3, 7]}
        found.append({**base, "name": f"{name}-plain", "loopscope": QUIET})
        found.append({**base, "name": f"{name}-probed", "loopscope": PROBED})
        for kind, loopscope in WATCHED.items() if name == SIMPLEST else ():
            found.append({**base, "name": f"{name}-{kind}", "loopscope": loopscope})
    return found


def test_every_pair_of_values_is_covered():
    for one, other in itertools.combinations(range(len(FACTORS)), 2):
        pairs = itertools.product(*(list(FACTORS.values())[index] for index in (one, other)))
        assert {(values[one], values[other]) for values in COVER} == set(pairs)


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def matrix(request, trainings):
    return trainings(_scenarios(), request.param, timeout=800)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_run_ends_bit_for_bit_as_without(matrix, name):
    probes = matrix.run(f"{name}-probed").sql("select distinct step from probe_loss order by step")
    assert probes.fetchall() == [(3,), (7,)]
    for rank in range(matrix.ranks):
        plain, probed = matrix[f"{name}-plain"][rank], matrix[f"{name}-probed"][rank]
        assert len(plain["objectives"]) == STEPS
        assert {key: probed[key] for key in COMPARED} == {key: plain[key] for key in COMPARED}


@pytest.mark.parametrize("kind", WATCHED)
def test_a_traced_run_ends_bit_for_bit_as_without(matrix, kind):
    for rank in range(matrix.ranks):
        plain, watched = matrix[f"{SIMPLEST}-plain"][rank], matrix[f"{SIMPLEST}-{kind}"][rank]
        assert len(plain["objectives"]) == STEPS
        assert {key: watched[key] for key in COMPARED} == {key: plain[key] for key in COMPARED}


def test_the_probes_and_traces_really_ran(matrix):
    both, plain = (matrix.run(f"{SIMPLEST}-{kind}") for kind in ("both", "plain"))
    probes = both.sql("select distinct step from probe_loss order by step").fetchall()
    traces = both.sql("select distinct step from router order by step").fetchall()
    assert probes == [(3,), (7,)]
    assert traces == [(s,) for s in range(1, 11)] + [(12,)]
    assert plain.sql("select count(*) from router").fetchall() == [(0,)]
    assert plain.sql("select count(distinct step) from loss").fetchall() == [(12,)]


def test_dropout_is_on(matrix):
    """The comparison would prove little without randomness in the forward."""
    assert len(set(matrix[f"{SIMPLEST}-plain"][0]["objectives"])) == 12


@pytest.mark.parametrize("name", COMPILED)
def test_a_probe_adds_no_graph(matrix, name):
    for rank in range(matrix.ranks):
        plain, probed = (matrix[f"{name}-{kind}"][rank] for kind in ("plain", "probed"))
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


@pytest.mark.parametrize(("name", "rank"), [("writer-fails", 0), ("other-fails", 1)])
def test_a_probe_that_failed_is_in_the_health_table_whichever_rank_it_was(failures, name, rank):
    query = "select step, severity, detail from health where event = 'probe_failed' order by step"
    rows = failures.run(name).sql(query).fetchall()
    assert [step for step, _, _ in rows] == [2, 4]
    for _, severity, detail in rows:
        assert severity == "critical"
        assert detail.startswith(f"rank {rank}: ProbeError: failed on purpose")


def test_the_writer_writes_its_rows_when_another_rank_fails(failures):
    steps = "select distinct step from probe_loss order by step"
    assert failures.run("other-fails").sql(steps).fetchall() == [(2,), (4,)]
    assert failures.run("writer-fails").sql(steps).fetchall() == []


def test_killed_in_a_probe_and_resumed(trainings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "run"
    loopscope = {**PROBED, "probe_every": 2}
    base = {"steps": 8, "checkpoint_every": 3, "hook": "probe_hooks", "model": {"dropout": 0.0}}
    base["draw_batches"] = True
    killed = {**base, "name": "killed", "out": str(folder), "loopscope": loopscope, "kill_in_probe": 6}
    trainings([killed], 2, killed=True)
    resumed = {**base, "name": "resumed", "out": str(folder), "loopscope": {**loopscope, "resume": True}}
    ended = trainings([resumed, {**base, "name": "whole", "loopscope": loopscope}], 2)
    for rank in range(2):
        for key in ("parameters", "buffers", "optimizer"):
            assert ended["resumed"][rank][key] == ended["whole"][rank][key], key
        assert ended["resumed"][rank]["objectives"] == ended["whole"][rank]["objectives"][3:]
        _assert_same_position(ended["resumed"][rank], ended["whole"][rank])
    assert ended["whole"][0]["next_batches"] != ended["whole"][1]["next_batches"]  # it can differ
    query = "select step, loss_mean from probe_loss where stratum_kind = 'all' order by step"
    assert package.open_run(folder).sql(query).fetchall() == ended.run("whole").sql(query).fetchall()


def _assert_same_position(resumed, whole):
    """The next batches are the same; the dataloader's bookkeeping differs, by one document that it read ahead.

    After a restart torchtitan's data set reads a document before it hands out what its buffers still hold. So the
    buffers of a resumed run begin with those of the whole run, the same tokens follow either way, and nothing but
    the buffers and the number of documents read is different. A run without probes that is resumed differs alike.
    """
    assert resumed["next_batches"] == whole["next_batches"]
    parts = resumed["dataloader_parts"].keys() | whole["dataloader_parts"].keys()
    differing = {
        name.rpartition(".")[2]
        for name in parts
        if resumed["dataloader_parts"].get(name) != whole["dataloader_parts"].get(name)
    }
    assert differing <= {"inputs_buffer", "labels_buffer", "positions_buffer", "sample_idx"}
    for name in ("inputs_buffer", "labels_buffer"):
        assert (
            resumed["buffers_ahead"][name][: len(whole["buffers_ahead"][name])]
            == whole["buffers_ahead"][name]
        )
    read = resumed["buffers_ahead"]["sample_idx"] - whole["buffers_ahead"]["sample_idx"]
    assert 0 <= read <= 1

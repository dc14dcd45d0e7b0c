"""Watching changes nothing: probed, traced and plain runs end with the same bits."""

import pytest

pytestmark = pytest.mark.ranks

QUIET = {"trace_every": 0, "probe_every": 0, "on_error": "raise"}
LOUD = {"trace_every": 1, "probe_every": 0, "on_error": "raise"}
PROBED = {"trace_every": 0, "probe_every": 1, "on_error": "raise"}
BOTH = {"trace_every": 2, "probe_every": 1, "on_error": "raise"}
COMPARED = ("objectives", "parameters", "buffers", "optimizer", "dataloader", "rng")


def scenarios():
    base = {"steps": 12, "model": {"dropout": 0.1}, "probe_steps": [3, 7]}
    return [
        {**base, "name": "plain", "loopscope": QUIET},
        {**base, "name": "probed", "loopscope": PROBED},
        {**base, "name": "traced", "loopscope": LOUD},
        {**base, "name": "both", "loopscope": BOTH},
    ]


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def finished(request, trainings):
    return trainings(scenarios(), request.param)


@pytest.mark.parametrize("name", ["probed", "traced", "both"])
def test_the_run_ends_bit_for_bit_as_without(finished, name):
    for rank in range(finished.ranks):
        plain, watched = finished["plain"][rank], finished[name][rank]
        assert len(plain["objectives"]) == 12
        assert {key: watched[key] for key in COMPARED} == {key: plain[key] for key in COMPARED}


def test_the_probes_and_traces_really_ran(finished):
    probes = finished.run("both").sql("select distinct step from probe_loss order by step").fetchall()
    traces = finished.run("both").sql("select distinct step from router order by step").fetchall()
    assert probes == [(3,), (7,)]
    assert traces == [(s,) for s in range(1, 11)] + [(12,)]
    assert finished.run("plain").sql("select count(*) from router").fetchall() == [(0,)]
    assert finished.run("plain").sql("select count(distinct step) from loss").fetchall() == [(12,)]


def test_dropout_is_on(finished):
    """The comparison would prove little without randomness in the forward."""
    assert len(set(finished["plain"][0]["objectives"])) == 12

"""Clients on one live run, over the real server, while another process writes it; `scripts/bench service` has fifty."""

from service_load import load

from loopscope import open_run


def test_clients_on_a_live_run(tmp_path):
    seen = load(tmp_path, clients=12, seconds=1.5)
    asked = [answer for each in seen["clients"] for answer in each]
    assert {status for _, status, _, _ in asked} == {200}
    # Every client was served again and again, with steps that only grow.
    for each in seen["clients"]:
        assert len(each) >= 3
        steps = [step for _, _, step, _ in each if step is not None]
        assert steps == sorted(steps)
    # The run went on, and none of its rows is missing.
    last = seen["last_step"]
    assert max(step for _, _, step, _ in asked if step is not None) > seen["first_step"]
    run = open_run(tmp_path / "live")
    assert run.sql("select count(*), max(step) from loss").fetchall() == [(last, last)]
    assert run.sql("select count(*) from router").fetchall() == [(last // 2 * 6,)]
    assert run.problems == []
    assert seen["grown"] < 400e6

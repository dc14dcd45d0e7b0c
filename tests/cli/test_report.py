"""The verb `report`: what it prints, where it writes, what it refuses."""

import pytest
from summary_runs import loss, make_run

from loopscope.cli import main


@pytest.fixture(autouse=True)
def no_bundle(monkeypatch):
    monkeypatch.setattr("loopscope.report.page.script_bundle", lambda: "")


def test_it_prints_the_findings_and_the_path(tmp_path, capsys):
    rows = [loss(s, 2.0, closure_error=0.1) for s in range(1, 31)]
    run = make_run(tmp_path / "run", rows)
    out = tmp_path / "a report.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "made: Something is wrong" in printed
    assert "The total loss is not the sum of its parts" in printed
    assert printed.splitlines()[-1] == str(out)
    assert "<!doctype html>" in out.read_text()


def test_the_rules_can_be_told_to_judge_earlier(tmp_path, capsys):
    run = make_run(tmp_path / "run", [loss(s, 2.0, closure_error=0.1) for s in range(1, 6)])
    assert main(["report", str(run), "-o", str(tmp_path / "a.html")]) == 0
    assert "not the sum" not in capsys.readouterr().out
    assert main(["report", str(run), "-o", str(tmp_path / "a.html"), "--sustain", "3"]) == 0
    assert "not the sum" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["report", "{run}", "-o", "{tmp}/no/a.html"], 1, "cannot be written"),
        (["report", "{tmp}/gone", "-o", "{tmp}/a.html"], 2, "is not a run"),
        (["report", *["{run}"] * 9, "-o", "{tmp}/a.html"], 2, "got 9 runs, expected 1 to 8"),
        (["report", "{run}", "-o", "{tmp}/a.html", "--sustain", "0"], 2, "sustain is 0"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, capsys, arguments, status, says):
    run = make_run(tmp_path / "run", [loss(1, 2.0)])
    assert main([a.format(run=run, tmp=tmp_path) for a in arguments]) == status
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html*"))

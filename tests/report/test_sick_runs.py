"""Real trainings with one thing wrong: the first screen names it, and names nothing on a healthy one."""

import pytest
from page_reader import Page
from sick_runs import train

from loopscope import open_run
from loopscope.alerts import RULES, AlertSettings
from loopscope.report import write_report

# 45 steps are no 1,000: the warm-up is shortened, the window is the default one.
SETTINGS = AlertSettings(warmup_steps=10)


@pytest.mark.usefixtures("no_bundle")
@pytest.mark.parametrize(
    ("sickness", "rule", "words"),
    [
        ("healthy", None, "Nothing to report: every rule is kept"),
        ("dead experts", "dead_expert", "2 experts (2, 5) of 8 got no token"),
        ("growing loop", "loop_growth", "growth 1.2, 1.2, 1.2 over the last loop steps"),
        ("loss counted twice", "closure", "the load-balancing loss (lb_loss) is counted twice in the total"),
    ],
)
def test_the_first_screen_names_what_is_wrong(tmp_path, sickness, rule, words):
    run = open_run(train(tmp_path / "run", sickness))
    (part,) = write_report([run], tmp_path / "report.html", settings=SETTINGS)
    found = part.findings.found
    assert (found[0].rule if found else None) == rule
    assert part.findings.early == ()
    text = Page(tmp_path / "report.html").text
    first_screen = text[: text.index("traced steps")]
    assert words in first_screen
    if rule:
        assert RULES[rule].title in first_screen
        assert f"Rule: {RULES[rule].bound}" in first_screen


@pytest.mark.usefixtures("no_bundle")
def test_a_loss_counted_twice_is_named_without_any_setting(tmp_path):
    run = open_run(train(tmp_path / "run", "loss counted twice"))
    (part,) = write_report([run], tmp_path / "report.html")
    assert [finding.rule for finding in part.findings.found] == ["closure"]
    # The rules ran beside the training too, and said so once; the replay does not count what they said.
    told = [row for row in run.arrow("health").to_pylist() if row["event"] == "alert"]
    (alert,) = part.findings.alerts
    assert [(row["step"], row["severity"]) for row in told] == [(alert.fired, "critical")]
    assert told[0]["detail"].startswith("closure: The total loss is not the sum of its parts")

"""Real trainings with one thing wrong: the first screen names it, and names nothing on a healthy one."""

from functools import cache

import pytest
from page_reader import Page
from sick_runs import WARM, train

from loopscope import open_run
from loopscope.alerts import RULES, AlertSettings
from loopscope.report import write_report

# 110 steps are no 1,000: the warm-up is shortened, the window is the default one.
SETTINGS = AlertSettings(warmup_steps=WARM)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(sickness) → folder of the run; each is trained once."""
    return cache(lambda sickness: train(tmp_path_factory.mktemp("sick") / "run", sickness))


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
def test_the_first_screen_names_what_is_wrong(trained, tmp_path, sickness, rule, words):
    run = open_run(trained(sickness))
    (part,) = write_report([run], tmp_path / "report.html", settings=SETTINGS)
    # That and nothing else, neither beside it nor as an early sign.
    assert [finding.rule for finding in part.findings.found] == ([rule] if rule else [])
    assert part.findings.early == ()
    broken = [check.title for check in part.checks if check.state in ("critical", "warn", "early")]
    assert len(broken) == (1 if rule else 0)
    text = Page(tmp_path / "report.html").text
    first_screen = text[: text.index("traced steps")]
    assert f"{12 - len(broken)} of 12 checks healthy" in first_screen or "beyond its bound" in first_screen
    assert words in first_screen
    if rule:
        assert RULES[rule].title in first_screen
        assert f"Rule: {RULES[rule].bound}" in first_screen


@pytest.mark.usefixtures("no_bundle")
def test_a_loss_counted_twice_is_named_without_any_setting(trained, tmp_path):
    run = open_run(trained("loss counted twice"))
    (part,) = write_report([run], tmp_path / "report.html")
    assert [finding.rule for finding in part.findings.found] == ["closure"]
    # The rules ran beside the training too, and said so once; the replay does not count what they said.
    told = [row for row in run.arrow("health").to_pylist() if row["event"] == "alert"]
    (alert,) = part.findings.alerts
    assert [(row["step"], row["severity"]) for row in told] == [(alert.fired, "critical")]
    assert told[0]["detail"].startswith("closure: The total loss is not the sum of its parts")

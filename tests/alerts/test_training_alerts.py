"""A real training from the command line whose rules are set to fire: told everywhere, and not a bit otherwise."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from loopscope import open_run
from loopscope.analysis.health_findings import replay
from loopscope.cli.train import Train, rank_arguments
from loopscope.integrations.torchtitan.text import PreparedText, prepare_text

pytestmark = pytest.mark.ranks

DRIVER = Path(__file__).with_name("train_driver.py")
STEPS = 8
RULES = {
    "warmup-steps": "0",
    "sustain": "2",
    "maxvio-share": "0.001",
    "maxvio-noise": "0.001",
    "maxvio-critical": "50",
}
SECRETS = ("tok3n", "hunter2")


def arguments(out: Path, text: PreparedText, steps: int, *flags: str) -> list[str]:
    """What `loopscope train` hands to torchtitan, for a training as small as can be."""
    train = Train(out=out, steps=steps, trace_every=1, probe_every=0, resume=steps > STEPS, torchtitan=flags)
    more = ["--training.local-batch-size", "2", "--training.seq-len", "32", "--checkpoint.interval", "5"]
    return [*rank_arguments(train, text), *more, "--debug.deterministic", "--debug.print-config"]


def flags_of(heard: Path) -> list[str]:
    notify = heard.with_suffix(".py")
    notify.write_text(
        f"import os, sys\nopen({str(heard)!r}, 'a').write(sys.stdin.read())\n"  # a line of its own
        "assert os.environ['LOOPSCOPE_ALERT_RULE'] and sys.argv[1:] == ['--level', 'a b']\n"
    )
    found = ["--loopscope.alerts.command", f"{sys.executable} {notify} --level 'a b'"]
    found += [
        "--loopscope.alerts.webhook",
        "http://user:hunter2@127.0.0.1:9/tok3n",
        "--loopscope.alerts.timeout-s",
        "20",
    ]
    for name, value in RULES.items():
        found += [f"--loopscope.alerts.rules.{name}", value]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory, rank_processes):
    """(folder of the runs, what was printed, what the command heard in the first attempt, and in the second)."""
    folder = tmp_path_factory.mktemp("told")
    source = folder / "text.txt"
    source.write_text("".join(Path(module.__file__).read_text() for module in (argparse, json, subprocess)))
    text = prepare_text(source, folder / "prepared", 512)
    heard = folder / "heard"
    plan = [
        arguments(folder / "with", text, STEPS, *flags_of(heard)),
        arguments(folder / "without", text, STEPS, "--loopscope.alerts.no-enabled"),
        arguments(folder / "with", text, STEPS + 2, *flags_of(heard)),
    ]
    (folder / "plan.json").write_text(json.dumps(plan))
    statuses, printed = rank_processes.run(DRIVER, str(folder / "plan.json"), ranks=1)
    assert statuses == [0], printed[-4000:]
    notices = [json.loads(line) for line in heard.read_text().splitlines()]
    by_attempt = [[n for n in notices if n["attempt"] == number] for number in (1, 2)]
    return folder, printed, *by_attempt


def test_every_visit_is_told_in_the_health_table_and_one_notice_at_the_command(runs):
    folder, _, first, _ = runs
    rows = (
        open_run(folder / "with")
        .sql("select * from health_all where event = 'alert' and attempt = 1")
        .fetchall()
    )
    visits = len(open_run(folder / "with").manifest.expected_visits)
    assert len(rows) >= visits
    notices = [notice for notice in first if notice["rule"] == "maxvio"]
    assert sum(notice["num_places"] for notice in notices) >= visits - 1
    assert len(notices) <= 2
    assert (notices[0]["severity"], notices[0]["attempt"], notices[0]["run_name"]) == ("warn", 1, "with")


def test_losses_are_bit_equal_to_those_of_a_run_without_rules(runs):
    folder = runs[0]
    query = f"select step, task_loss, total_loss, grad_norm from loss where step <= {STEPS} order by step"
    with_rules, without = (open_run(folder / name).sql(query).fetchall() for name in ("with", "without"))
    assert len(without) == STEPS
    assert with_rules == without
    assert not open_run(folder / "without").sql("select * from health where event = 'alert'").fetchall()


def test_a_webhook_that_is_not_there_is_a_health_row_and_costs_nothing_else(runs):
    rows = (
        open_run(runs[0] / "with")
        .sql("select detail from health_all where event = 'alert_not_delivered'")
        .fetchall()
    )
    assert rows
    assert all("webhook: ConnectionRefusedError" in detail for (detail,) in rows)


def test_no_secret_is_stored_or_printed(runs):
    folder, printed, *_ = runs
    texts = [printed, *(path.read_text() for path in (folder / "with").glob("*.json"))]
    texts += [path.read_text(errors="replace") for path in (folder / "with").rglob("*.log")]
    assert "127.0.0.1:9/***" in texts[1]
    assert not [secret for secret in SECRETS for text in texts if secret in text]


def test_a_resume_tells_nobody_again_and_the_replay_agrees(runs):
    folder, _, first, again = runs
    told = {(notice["rule"], place) for notice in first for place in notice["places"]}
    assert not [
        n for n in again if n["rule"] == "maxvio" and {("maxvio", place) for place in n["places"]} & told
    ]
    run = open_run(folder / "with")
    assert [attempt.attempt for attempt in run.attempts] == [1, 2]
    found = {(a.rule, a.subject, a.since) for a in replay(run) if a.rule == "maxvio"}
    rows = run.sql("select detail from health where event = 'alert' and detail like 'maxvio:%'").fetchall()
    live = set()
    for (detail,) in rows:
        subject, _, rest = detail.partition(". ")[2].partition(", since step ")
        live.add(("maxvio", subject, int(rest.partition(":")[0])))
    assert live == found

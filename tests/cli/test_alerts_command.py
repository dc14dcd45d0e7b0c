"""`loopscope alerts`: rules with the bounds in force, and what they say of a run."""

import json
from dataclasses import replace

import numpy as np
import pytest
from report_runs import Shape, generated_run

import loopscope.cli as cli
from loopscope.alerts import RULES, AlertConfig, AlertSettings
from loopscope.store import RunStore

SHAPE = Shape(steps=1500, every=10, loops=2, layers=1)
VISITS = SHAPE.loops + 2


def sick(path, table="router", **columns):
    return generated_run(path / "run", replace(SHAPE, changes={table: columns}))


def low(value, rows=150 * VISITS):
    """The load entropy of one visit."""
    return np.where(np.arange(rows) % VISITS == 1, value, 1.0)


def test_without_a_run_every_rule_says_its_bound_and_why(capsys):
    assert cli.main(["alerts", "--sustain", "7"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for rule in RULES.values():
        assert f"{rule.name}: {rule.title}" in out
    assert "by 7 traces in a row" in out
    assert "at 0 over 7 traces" in out


def test_a_healthy_run_has_no_alert(capsys, tmp_path):
    assert cli.main(["alerts", str(generated_run(tmp_path / "run", SHAPE))]) == 0
    out = capsys.readouterr().out
    assert "[finished]" in out
    assert "No alert." in out


def test_a_warning_that_lasts_is_shown_and_a_critical_alert_is_status_1(capsys, tmp_path):
    assert cli.main(["alerts", str(sick(tmp_path / "a", load_entropy_ratio=low(0.7)))]) == 0
    out = capsys.readouterr().out
    assert "warn: A few experts carry the load (load_entropy)" in out
    assert "loop step 0, layer 0" in out
    assert cli.main(["alerts", str(sick(tmp_path / "b", load_entropy_ratio=low(0.3)))]) == 1
    assert "critical: A few experts" in capsys.readouterr().out


def test_the_runs_own_bounds_are_in_force_until_a_flag_says_otherwise(capsys, tmp_path):
    path = sick(tmp_path, load_entropy_ratio=low(0.3))
    with RunStore.open(path) as store:
        rules = AlertSettings(load_entropy=0.2, load_entropy_critical=0.1)
        store.update_manifest(configuration={"loopscope": {"alerts": AlertConfig(rules=rules).as_plain()}})
    assert cli.main(["alerts", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "No alert." in out
    assert "Bounds other than the defaults: load_entropy 0.2, load_entropy_critical 0.1." in out
    assert cli.main(["alerts", str(path), "--warmup-steps", "0", "--sustain", "200"]) == 0
    assert "warmup_steps 0, sustain 200" in " ".join(capsys.readouterr().out.split())


def test_ten_places_of_a_rule_unless_all_are_asked_for(capsys, tmp_path):
    shape = replace(SHAPE, loops=20, changes={"router": {"load_entropy_ratio": np.full(150 * 22, 0.3)}})
    path = generated_run(tmp_path / "run", shape)
    assert cli.main(["alerts", str(path)]) == 1
    out = capsys.readouterr().out
    assert "and 12 more; --every-place prints them all" in out
    assert cli.main(["alerts", str(path), "--every-place"]) == 1
    assert capsys.readouterr().out.count("load_entropy_ratio 0.3") == 22


def test_json_for_programs(capsys, tmp_path):
    assert cli.main(["alerts", str(sick(tmp_path, load_entropy_ratio=low(0.3))), "--json"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["rule"], found["severity"], found["since"], found["cleared"]) == (
        "load_entropy", "critical", 1010, None,
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["alerts", "summary"])
def test_text_of_strangers_is_text(capsys, tmp_path, verb):
    severity = np.where(np.arange(2 * 150) == 6, "warn", "info")
    changes = {"health": {"severity": severity.tolist(), "detail": "[bold]\x1b[31mvisits[/] missing"}}
    path = generated_run(tmp_path / "run", replace(SHAPE, changes=changes), name="name\x1b[2J\u202e")
    assert cli.main([verb, str(path)]) == 0
    out = capsys.readouterr().out
    assert "[bold]" in out
    assert "name\ufffd[2J\ufffd" in out
    assert "\x1b" not in out


def test_wrong_questions_are_status_2(capsys, tmp_path):
    assert cli.main(["alerts", str(tmp_path)]) == 2
    assert cli.main(["alerts", "--sustain", "0"]) == 2
    assert "sustain is 0" in capsys.readouterr().err

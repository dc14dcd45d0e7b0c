from __future__ import annotations

from pathlib import Path

import pytest

from loopscope.cli import main

CAPTURE = Path(__file__).parents[1] / "capture"


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CAPTURE))


def test_yaml_can_be_fed_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml
    from capture_models import plan

    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan(), sort_keys=False))
    arguments = ["plan", "--model", "capture_models:meta_model", "--config", str(path)]
    assert main([*arguments, "--yaml"]) == 0
    first = capsys.readouterr().out
    path.write_text(first)
    assert main([*arguments, "--yaml"]) == 0
    assert capsys.readouterr().out == first
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "E 6, k 2, softmax" in text
    assert text.endswith(first)


def test_a_wrong_plan_is_a_wrong_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("core.0.mo: {merge: sum}\n")
    assert main(["plan", "--model", "capture_models:meta_model", "--config", str(path)]) == 2
    assert "Did you mean 'core.0.moe'" in capsys.readouterr().err


def test_a_transformers_plan_needs_no_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = pytest.importorskip("transformers")
    hf.JetMoeConfig(hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path)
    assert main(["plan", "--backend", "transformers", "--model", str(tmp_path / "config.json")]) == 0
    text = capsys.readouterr().out
    assert "decode.jetmoe_idx" in text
    assert "note: JetMoE routes its attention heads as well" in text


def test_discover_prints_a_plan_that_was_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "--discover",
        "--model",
        "test_discover:Looped",
        "--batch",
        "test_discover:ids",
        "--yaml",
    ]
    assert main(arguments) == 0
    import yaml

    plan = yaml.safe_load(capsys.readouterr().out)
    assert plan["core.0"]["calls"] == 3
    assert main([*arguments[:1], *arguments[2:6]]) == 2
    assert "--discover" in capsys.readouterr().err

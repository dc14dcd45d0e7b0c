from __future__ import annotations

from pathlib import Path

import pytest

from loopscope.cli import main

CAPTURE = Path(__file__).parents[1] / "capture"


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CAPTURE))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    import yaml
    from capture_models import plan

    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan(), sort_keys=False))
    return path


def test_every_metric_with_its_way(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capabilities", "--model", "capture_models:meta_model", "--config", str(config)]) == 0
    text = capsys.readouterr().out
    for line in (
        "num_experts      6",
        "margin_mean",
        "mean_prob",
        "transform   router_probs is derived",
        "dropless",
    ):
        assert line in text


def test_a_required_metric_that_is_absent_is_status_2(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "capture_models:meta_model", "--config", str(config), "--require", "expert_bias"]
    assert main(["capabilities", *arguments]) == 2
    assert "adds no bias" in capsys.readouterr().err


def test_a_transformers_config_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = pytest.importorskip("transformers")
    hf.MixtralConfig(hidden_size=32, num_hidden_layers=2, num_local_experts=4).save_pretrained(tmp_path)
    arguments = ["--backend", "transformers", "--model", str(tmp_path / "config.json")]
    assert main(["capabilities", *arguments]) == 0
    text = capsys.readouterr().out
    assert "MixtralForCausalLM on transformers" in text
    assert "(config.num_local_experts)" in text


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("capture_models", "expected 'package.module:function'"),
        ("capture_models:nothing", "cannot be imported"),
    ],
)
def test_a_wrong_name_of_a_model(model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capabilities", "--model", model]) == 2
    assert message in capsys.readouterr().err

from __future__ import annotations

import pytest

from loopscope.errors import ConfigError
from loopscope.integrations.torchtitan import launch


def test_a_plain_trainer_is_refused_before_its_flags_are_told_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--module", "llama3", "--config", "llama3_debugmodel", "--loopscope.out", "somewhere"]
    assert launch.main(flags) == 2
    said = capsys.readouterr().err
    assert "torchtitan.trainer.Trainer.Config, expected LoopscopeTrainer.Config" in said
    assert "Unrecognized" not in said


def test_a_configuration_of_ours_is_taken() -> None:
    config = launch._parse(["--module", launch.MODULE, "--config", "debug", "--training.steps", "7"])
    assert config.training.steps == 7
    assert config.loopscope is not None


def test_an_unknown_configuration_is_named() -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        launch._parse(["--module", launch.MODULE, "--config", "nosuch"])

from __future__ import annotations

import pytest

from loopscope.cli import main


def test_it_prints_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support"]) == 0
    text = capsys.readouterr().out
    for pair in ("pretrain on torchtitan", "probe on transformers", "sft on mlx", "probe on mlx: no adapter"):
        assert pair in text


def test_one_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support", "--task", "sft", "--backend", "mlx"]) == 0
    text = capsys.readouterr().out
    assert "compile" in text
    assert "rejected" in text
    assert "torchtitan" not in text


def test_a_pair_that_is_not_supported_is_a_wrong_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support", "--task", "probe", "--backend", "mlx"]) == 2
    assert "it supports pretrain, sft" in capsys.readouterr().err

from __future__ import annotations

import pytest

from loopscope.catalog.registry import TRAINING_METRICS
from loopscope.cli import main


def test_it_lists_every_metric(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["metrics"]) == 0
    out = capsys.readouterr().out
    for _, name in TRAINING_METRICS:
        assert name in out


def test_it_lists_one_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["metrics", "--table", "residual"]) == 0
    out = capsys.readouterr().out
    assert "token_correlation" in out
    assert "maxvio_count" not in out


def test_an_unknown_table_is_a_wrong_question(capsys):
    with pytest.raises(SystemExit) as caught:
        raise SystemExit(main(["metrics", "--table", "routers"]))
    assert caught.value.code == 2

from __future__ import annotations

import logging

import pytest
from settings_readers import READERS, fields_read, fields_read_by

from loopscope.capture import RunSettings, SupportEntry, check_config
from loopscope.capture.registry import adapters
from loopscope.capture.support import SUPPORT, gaps, is_reviewed, preflight
from loopscope.errors import ConfigError, UnsupportedError

PAIRS = [(task, backend) for backend, tasks in adapters().items() for task in tasks]


def test_every_supported_pair_is_reviewed_and_every_reviewed_pair_supported() -> None:
    assert set(SUPPORT) == set(PAIRS)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_field_is_declared_once_and_with_a_reason(pair: tuple[str, str]) -> None:
    names = [entry.field for entry in gaps(*pair)]
    assert len(names) == len(set(names))
    assert all(len(entry.reason) > 10 for entry in gaps(*pair) if entry.status == "rejected")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_table_agrees_with_what_the_code_reads(pair: tuple[str, str]) -> None:
    read = fields_read_by(READERS[pair[1]], RunSettings.names())
    for entry in gaps(*pair):
        if entry.reads:
            assert entry.field in read, (
                f"{pair}: {entry.field} is no longer read; drop reads=True or the entry"
            )
        else:
            assert entry.field not in read, f"{pair}: {entry.field} is read now; the entry is stale"


def test_the_guard_sees_reads_and_nothing_else() -> None:
    source = (
        "def f(settings, config, other):\n    settings.compile\n    config.recompute = 1\n    other.resume\n"
    )
    assert fields_read(source, RunSettings.names()) == {"compile"}
    assert fields_read("class A:\n    def f(self):\n        return self._settings.verify", ["verify"]) == {
        "verify"
    }
    assert "verify" in fields_read_by(READERS["torch"], RunSettings.names())


def test_only_what_was_really_set_is_reported() -> None:
    assert check_config(RunSettings(), "pretrain", "mlx") == []
    assert check_config(RunSettings(compile=False), "pretrain", "mlx") == []
    assert [entry.field for entry in check_config(RunSettings(compile=True), "pretrain", "mlx")] == [
        "compile"
    ]
    assert check_config(RunSettings(compile=True), "pretrain", "torch") == []
    assert RunSettings(compile=True).fields_set == {"compile"}


def test_a_pair_that_nobody_reviewed_reports_nothing() -> None:
    assert not is_reviewed("pretrain", "jax")
    assert check_config(RunSettings(compile=True, tensor_parallel=True), "pretrain", "jax") == []


def test_preflight_shows_every_gap_and_stops_at_a_rejected_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "loopscope"):
        preflight(RunSettings(grad_norm=True), "pretrain", "torch")
    assert "grad_norm=True is ignored" in caplog.text
    with pytest.raises(UnsupportedError, match="tensor_parallel=True"):
        preflight(RunSettings(tensor_parallel=True), "pretrain", "transformers")


def test_an_entry_names_a_real_field_and_status() -> None:
    with pytest.raises(ConfigError, match="no field of RunSettings"):
        SupportEntry("pipeline", "ignored", "why")
    with pytest.raises(ConfigError, match="expected ignored or rejected"):
        SupportEntry("compile", "partial", "why")  # type: ignore[arg-type]

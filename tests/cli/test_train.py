"""`loopscope train`: what it refuses before anything starts, and the command that it starts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from loopscope.cli.train import CONFIGS, Train, check_out, rank_arguments
from loopscope.errors import ConfigError, NotARunError, RunExistsError
from loopscope.integrations.torchtitan.text import VOCAB_SIZE, prepare_text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ranks", 0, "--ranks is 0, expected an integer >= 1"),
        ("steps", 0, "--steps is 0, expected an integer >= 1"),
        ("trace_every", -1, "--trace-every is -1, expected an integer >= 0"),
        ("probe_every", -5, "--probe-every is -5, expected an integer >= 0"),
        ("seed", -1, "--seed is -1"),
        ("config", "debgu", "--config is 'debgu', expected one of debug, wide"),
    ],
)
def test_wrong_values_are_named(field: str, value: object, message: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match=message):
        replace(Train(out=out), **{field: value}).run()
    assert not out.exists()


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunExistsError, match=r"already holds a run.*--resume"):
        check_out(tmp_path, resume=False)
    check_out(tmp_path, resume=True)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match="holds no run"):
        check_out(tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, expected a folder"):
        check_out(tmp_path / "file", resume=False)
    with pytest.raises(ConfigError, match="cannot be made"):
        check_out(tmp_path / "file" / "run", resume=False)


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="permission denied"):
        check_out(tmp_path, resume=False)


def test_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="holds 0 characters"):
        Train(out=tmp_path / "run", text=tmp_path / "empty.txt").run()


def test_more_ranks_than_documents_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("some words\n" * 30)
    with pytest.raises(ConfigError, match=r"documents for --ranks 64"):
        Train(out=tmp_path / "run", text=tmp_path / "short.txt", ranks=64).run()


def _flags(arguments: list[str]) -> dict[str, str]:
    return {name: value for name, value in pairwise(arguments) if name.startswith("--")}


def test_the_command_says_everything(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some words of a text\n" * 100)
    text = prepare_text(tmp_path / "t.txt", tmp_path / "cache", VOCAB_SIZE)
    train = Train(
        out=tmp_path / "run",
        steps=40,
        trace_every=5,
        probe_every=20,
        dtype="bf16",
        recompute="full",
        resume=True,
        seed=3,
        torchtitan=("--training.local-batch-size", "8"),
    )
    arguments = rank_arguments(train, text)
    flags = _flags(arguments)
    assert flags["--config"] == "debug"
    assert flags["--loopscope.out"] == str(tmp_path / "run")
    assert (flags["--loopscope.trace-every"], flags["--loopscope.probe-every"]) == ("5", "20")
    assert (flags["--training.steps"], flags["--debug.seed"]) == ("40", "3")
    assert flags["--training.mixed-precision-param"] == "bfloat16"
    assert flags["--hf-assets-path"] == str(text.tokenizer_path)
    assert flags["--dataloader.dataset-path"] == str(text.dataset_path)
    assert flags["--training.local-batch-size"] == "8"
    assert "--loopscope.resume" in arguments
    assert arguments[-1] == "activation-checkpoint:full"  # torchtitan takes no flag after it


def test_torchtitan_accepts_the_command(tmp_path: Path) -> None:
    from loopscope.models import cpu_compat

    cpu_compat.enable()
    from torchtitan.config import ConfigManager

    train = Train(
        out=tmp_path, steps=7, dtype="bf16", recompute="full", torchtitan=("--training.seq-len", "64")
    )
    config = ConfigManager().parse_args(rank_arguments(train, None))
    assert (config.training.steps, config.training.seq_len) == (7, 64)
    assert config.training.mixed_precision_param == "bfloat16"
    assert type(config.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert config.loopscope.out == str(tmp_path)
    assert ConfigManager().parse_args(rank_arguments(Train(out=tmp_path), None)).activation_checkpoint is None


def test_configs_and_their_vocabulary_are_those_of_the_integration() -> None:
    from loopscope.models import cpu_compat

    cpu_compat.enable()
    from loopscope.integrations.torchtitan import configs

    own = {
        name for name, value in vars(configs).items() if getattr(value, "__module__", "") == configs.__name__
    }
    assert {name for name in own if not name.startswith("_")} == set(CONFIGS)
    for name in CONFIGS:
        assert getattr(configs, name)().model_spec.model.vocab_size == VOCAB_SIZE

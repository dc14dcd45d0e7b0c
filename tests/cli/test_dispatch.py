"""The dispatcher: exit statuses, messages without tracebacks, and verbs that load only when asked for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import loopscope.cli as cli
from loopscope.errors import (
    CheckpointMismatchError,
    ConfigError,
    LeakError,
    LoopscopeError,
    MetricInputError,
    NotARunError,
    RunExistsError,
    SchemaError,
    StoreError,
    UnsupportedError,
)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch):
    """Installs a verb `stub` that runs what a test gives it."""

    def install(behaviour) -> None:
        @dataclass(frozen=True, kw_only=True)
        class Stub:
            """A verb."""

            steps: int = 1
            """How many."""

            def run(self) -> int:
                return behaviour(self)

        fake = SimpleNamespace(Stub=Stub)
        monkeypatch.setattr(cli, "import_module", lambda name: fake)
        monkeypatch.setitem(cli._VERBS, "stub", "A verb.")

    return install


def _raise(error: BaseException):
    def behaviour(_self) -> int:
        raise error

    return behaviour


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_verbs_status_is_the_commands(status: int, verb) -> None:
    verb(lambda self: status)
    assert cli.main(["stub"]) == status


def test_flags_reach_the_verb(verb) -> None:
    seen = []
    verb(lambda self: seen.append(self.steps) or 0)
    assert cli.main(["stub", "--steps", "7"]) == 0
    assert seen == [7]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError, 2),
        (UnsupportedError, 2),
        (NotARunError, 2),
        (RunExistsError, 2),
        (CheckpointMismatchError, 2),
        (LeakError, 1),
        (MetricInputError, 1),
        (StoreError, 1),
        (SchemaError, 1),
        (LoopscopeError, 1),
    ],
)
def test_an_error_is_one_message_and_a_status(
    error: type[LoopscopeError], status: int, verb, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(_raise(error("got 1, expected 2. Change it.")))
    assert cli.main(["stub"]) == status
    captured = capsys.readouterr()
    assert captured.err == "loopscope stub: got 1, expected 2. Change it.\n"
    assert captured.out == ""


def test_an_error_that_is_not_ours_keeps_its_traceback(verb) -> None:
    verb(_raise(ZeroDivisionError("mine")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["stub"])


def test_a_module_that_no_extra_brings_is_an_error_of_ours(verb) -> None:
    verb(_raise(ModuleNotFoundError("No module named 'other'", name="other")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["stub"])


def test_interruption_has_the_shells_status(verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(_raise(KeyboardInterrupt()))
    assert cli.main(["stub"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--stpes", "3"], ["--steps", "many"]])
def test_a_wrong_flag_is_a_wrong_question(flags: list[str], verb) -> None:
    verb(lambda self: 0)
    with pytest.raises(SystemExit) as error:
        cli.main(["stub", *flags])
    assert error.value.code == 2


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_no_verb_is_a_wrong_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "verbs:" in capsys.readouterr().err


def test_help_lists_every_verb_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in cli._VERBS)
    assert "train" in cli._VERBS


@pytest.mark.parametrize("name", sorted(cli._VERBS))
def test_every_verb_loads_and_explains_its_flags(name: str) -> None:
    command = cli._load(name)
    assert command.__doc__
    assert callable(command.run)
    with pytest.raises(SystemExit) as error:
        cli.main([name, "--help"])
    assert error.value.code == 0


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loopscope.cli", "nope"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no verb 'nope'" in done.stderr


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    script = f"{sys.executable} -m loopscope.cli train --help | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr

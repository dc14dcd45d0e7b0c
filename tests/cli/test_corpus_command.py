"""`loopscope corpus`: what it says and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopscope.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for domain, words in (("prose", "the ship came home at last and "), ("logs", "12:00 INFO ready ")):
        (tmp_path / "mine" / domain).mkdir(parents=True)
        (tmp_path / "mine" / domain / "a.txt").write_text(words * 50)
    return tmp_path / "mine"


def _build(folder: Path, *licence: str) -> int:
    return main(["corpus", "build", str(folder), "--licence", *licence, "--description", "mine"])


def test_build_then_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _build(folder, "prose=CC0-1.0", "logs=MIT") == 0
    assert main(["corpus", "verify", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "mine: 2 documents as the manifest says" in shown
    assert "MIT" in shown


def test_a_changed_text_or_bucket_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _build(folder, "CC0-1.0") == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["documents"][0]["repetition_rate"] = 0.1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert main(["corpus", "verify", str(folder)]) == 1
    assert "with repetition rate 0.1" in capsys.readouterr().err
    (folder / "prose" / "a.txt").write_text("other " * 200)
    assert main(["corpus", "verify", str(folder)]) == 1
    assert "prose/a.txt has SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("licence", "message"),
    [
        (("",), "--licence is ''"),
        (("prose=CC0-1.0", "MIT"), "one per domain"),
        (("prose=",), "one per domain"),
    ],
)
def test_licences_that_say_nothing(
    folder: Path, licence: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _build(folder, *licence) == 2
    assert message in capsys.readouterr().err


def test_questions_that_are_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["corpus", "build"]) == 2
    assert main(["corpus", "build", str(folder / "none"), "--licence", "MIT", "--description", "x"]) == 2
    assert main(["corpus", "verify", "nope"]) == 2
    assert _build(folder, "MIT") == 0
    assert _build(folder, "MIT") == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["corpus", "list"]) == 0
    assert "core" in capsys.readouterr().out.split()

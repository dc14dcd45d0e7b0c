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


def test_what_a_build_leaves_out_and_what_is_too_long_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "prose" / "notes.md").write_text("no document")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "a.txt").write_text("hidden " * 200)
    (folder / "prose" / "book.txt").write_text("once more and " * 2000)
    assert _build(folder, "CC0-1.0") == 0
    shown = capsys.readouterr().out
    assert "mine: 3 documents as the manifest says" in shown
    assert (
        "left out: 2 file(s) that are hidden or do not end in .txt, such as .cache/a.txt, prose/notes.md"
        in shown
    )
    assert "long: 1 document(s) above 20000 characters, such as prose/book.txt" in shown
    assert "few: 3 document(s)" in shown


def test_a_domain_that_is_not_the_folder_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _build(folder, "CC0-1.0") == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["documents"][0]["domain"] = "code"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert main(["corpus", "verify", str(folder)]) == 1
    assert "with the domain 'code', expected its first folder" in capsys.readouterr().err


def _same(path: Path) -> None:
    path.write_bytes((path.parent / "a.txt").read_bytes())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "prose/z.txt (Is a directory)"),
        (lambda path: path.symlink_to("nowhere"), "prose/z.txt (No such file or directory)"),
        (lambda path: path.write_bytes(b"\0\1" * 800), "prose/z.txt holds NUL characters"),
        (lambda path: path.write_bytes(b"\xff" * 800), "prose/z.txt is not UTF-8 (byte 0)"),
        (lambda path: path.write_bytes(b""), "prose/z.txt has 0 characters"),
        (lambda path: path.write_text(" \n" * 800), "prose/z.txt has 0 characters"),
        (_same, "prose/z.txt is the same as prose/a.txt"),
    ],
)
def test_what_is_no_document(folder: Path, make, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder / "prose" / "z.txt")
    assert _build(folder, "CC0-1.0") == 1
    assert message in capsys.readouterr().err
    assert not (folder / "manifest.json").exists()


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

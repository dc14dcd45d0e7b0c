"""One command writes what derives from the catalogue; nothing in the repository differs from it."""

from __future__ import annotations

from pathlib import Path

from loopscope.cli import main
from loopscope.cli.generate import documents

ROOT = Path(__file__).parents[2]


def test_the_repository_holds_what_the_catalogue_says(capsys):
    assert main(["generate", "--check", "--folder", str(ROOT)]) == 0, capsys.readouterr().out


def test_it_writes_what_is_missing_and_only_that(tmp_path, capsys):
    assert main(["generate", "--folder", str(tmp_path)]) == 0
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")} == set(documents())
    assert main(["generate", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("written") == len(documents())


def test_what_differs_is_named_and_not_written_by_a_check(tmp_path, capsys):
    main(["generate", "--folder", str(tmp_path)])
    page = tmp_path / "docs/metrics.md"
    page.write_text("stale")
    assert main(["generate", "--check", "--folder", str(tmp_path)]) == 1
    assert "docs/metrics.md differs" in capsys.readouterr().out
    assert page.read_text() == "stale"


def test_the_columns_of_a_published_schema_are_never_written_over(tmp_path, capsys):
    main(["generate", "--folder", str(tmp_path)])
    name = next(name for name in documents() if name.startswith("schemas/loss"))
    changed = documents()[name].replace('"name": "lr"', '"name": "learning_rate"')
    (tmp_path / name).write_text(changed)
    assert main(["generate", "--folder", str(tmp_path)]) == 1
    assert "never changes its columns" in capsys.readouterr().out
    assert (tmp_path / name).read_text() == changed


def test_a_marked_part_of_a_page_is_written_and_checked_and_nothing_else_of_it(tmp_path, capsys):
    main(["generate", "--folder", str(tmp_path)])
    page = tmp_path / "docs/trackers.md"
    page.write_text("before\n<!-- generated: tracker keys -->\nstale\n<!-- end: tracker keys -->\nafter\n")
    assert main(["generate", "--check", "--folder", str(tmp_path)]) == 1
    assert "docs/trackers.md differs" in capsys.readouterr().out
    assert main(["generate", "--folder", str(tmp_path)]) == 0
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "| `moe/dead` | sum of `dead_experts` of `router` |" in lines
    assert main(["generate", "--check", "--folder", str(tmp_path)]) == 0

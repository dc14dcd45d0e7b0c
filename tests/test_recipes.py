"""The page of recipes and what `scripts/bench recipes` runs are about the same packages; the bench runs the blocks."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "scripts/benches"), str(ROOT / "scripts/benches/lib")]

from recipe_run import LINES, block_of  # noqa: E402
from recipe_subjects import SUBJECTS  # noqa: E402
from recipes import PACKAGES, PAGE  # noqa: E402


def test_every_section_is_run() -> None:
    sections = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(sections) == sorted(SUBJECTS) == sorted(PACKAGES)


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_recipe_is_short_and_attaches_last(name: str) -> None:
    code = block_of(PAGE, name)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= LINES
    last = ast.parse(code).body[-1]
    assert ast.unparse(last).startswith("run = loopscope.attach(model, out=OUT, ")

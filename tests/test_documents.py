"""Every path that the documents for engineers name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = (ROOT, ROOT / "src/loopscope")


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "src/loopscope/collect/README.md"])
def test_the_paths_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`([\w./-]+/[\w./-]*|[\w./-]+\.(?:py|md|toml))`", text)
    assert named
    here = (*PLACES, (ROOT / name).parent)
    assert [path for path in named if not any((place / path).exists() for place in here)] == []

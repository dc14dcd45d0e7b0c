"""A class name means one thing: no two public module-level classes of `src` share theirs."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(SRC).as_posix())
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert len(places) > 100
    assert not shared, shared

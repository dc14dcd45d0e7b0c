"""`schemas/<table>.v<N>.json`: every version of every table as a file, so that a change of one is seen in review."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from loopscope.store.schema import TableSchema
from loopscope.store.tables import TABLES


def schema_documents(tables: Mapping[str, TableSchema] = TABLES) -> dict[str, str]:
    """File name → content, for every version of every table."""
    return {
        f"{table.name}.v{version}.json": json.dumps(
            table.at(version).describe(), indent=2, ensure_ascii=False
        )
        + "\n"
        for table in tables.values()
        for version in range(1, table.version + 1)
    }


def write_schemas(folder: Path, tables: Mapping[str, TableSchema] = TABLES) -> list[Path]:
    """Write the documents of versions that have none yet. A version that has one is never written again.

    A changed column needs a new version of its table, and so a new file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in schema_documents(tables).items():
        path = folder / name
        if not path.exists():
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def schema_differences(folder: Path, tables: Mapping[str, TableSchema] = TABLES) -> list[str]:
    """What differs between the registry and the files; empty when they agree."""
    expected = schema_documents(tables)
    there = {p.name: p.read_text(encoding="utf-8") for p in folder.glob("*.v*.json")}
    faults = [
        f"{name} is missing: generate it with `loopscope schemas --write`" for name in expected.keys() - there
    ]
    faults += [f"{name} belongs to no table of the registry" for name in there.keys() - expected.keys()]
    faults += [
        f"{name} differs from the registry: a published version never changes; add a version with the new column"
        for name in expected.keys() & there.keys()
        if expected[name] != there[name]
    ]
    return sorted(faults)

"""`schemas/<table>.v<N>.json`: every version of every table as a file, so that a change of one is seen in review."""

import json
from collections.abc import Mapping

from loopscope.errors import SchemaError
from loopscope.store.schema import TableSchema
from loopscope.store.tables import TABLES


def schema_documents(tables: Mapping[str, TableSchema] = TABLES) -> dict[str, str]:
    """File name → content, for every version of every table that is read."""
    return {
        f"{table.name}.v{version}.json": json.dumps(
            table.at(version).describe(), indent=2, ensure_ascii=False
        )
        + "\n"
        for table in tables.values()
        for version in range(table.oldest, table.version + 1)
    }


def check_published(name: str, published: str, generated: str) -> None:
    """Refuse to change the columns of a published version; their wording may change.

    Raises:
        SchemaError: names the document and the fix.
    """
    if _columns(published) != _columns(generated):
        raise SchemaError(
            f"schemas/{name} differs from the catalogue: a published version never changes its columns. Raise the "
            "table's `version`, and give the new columns `since`"
        )


def _columns(document: str) -> list[tuple[object, ...]]:
    plain = json.loads(document)
    return [(c["name"], c["type"], c["nullable"], c["since"]) for c in plain["columns"]]

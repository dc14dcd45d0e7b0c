"""`loopscope schemas`: the tables and their columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Group

from loopscope.cli.console import make_console, make_table, titled
from loopscope.store.documents import schema_differences, write_schemas
from loopscope.store.schema import TableSchema
from loopscope.store.tables import TABLES


@dataclass(frozen=True, kw_only=True, slots=True)
class Schemas:
    """Print the tables and their columns; keep the generated files in step with them."""

    table: Annotated[str | None, tyro.conf.Positional] = None
    """Only this table."""
    write: bool = False
    """Write the files of versions that have none yet. A published version is never written again."""
    check: bool = False
    """Exit with 1 where the files differ from the registry."""
    folder: Path = Path("schemas")
    """Where the files are."""

    def run(self) -> int:
        """Print, write or check."""
        console = make_console()
        if self.write:
            for path in write_schemas(self.folder):
                console.print(f"written: {path}")
        if self.check or self.write:
            faults = schema_differences(self.folder)
            for fault in faults:
                console.print(fault, markup=False)
            return 1 if faults else 0
        if self.table is not None and self.table not in TABLES:
            make_console(stderr=True).print(
                f"there is no table {self.table!r}; expected one of {', '.join(TABLES)}", markup=False
            )
            return 2
        for schema in TABLES.values():
            if self.table in (None, schema.name):
                console.print(_rendered(schema))
        return 0


def _rendered(schema: TableSchema) -> object:
    table = make_table(("column", "type", "meaning"), left=("column", "type", "meaning"))
    for column in schema.columns:
        table.add_row(column.name, column.type.replace("[", "\\["), column.doc.replace("[", "\\["))
    return Group(*titled(f"{schema.name} (version {schema.version})", table))

"""`loopscope schemas`: the tables and their columns."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Group

from loopscope.cli.console import make_console, make_table, titled
from loopscope.store.schema import TableSchema
from loopscope.store.tables import TABLES


@dataclass(frozen=True, kw_only=True, slots=True)
class Schemas:
    """Print the tables and their columns."""

    table: Annotated[str | None, tyro.conf.Positional] = None
    """Only this table."""

    def run(self) -> int:
        """Print them; 2 where there is no such table."""
        console = make_console()
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
    headings = ("column", "type", "meaning")
    rows = [(column.name, column.type, column.formula) for column in schema.columns]
    return Group(
        *titled(f"{schema.name} (version {schema.version})", make_table(headings, rows, left=headings))
    )

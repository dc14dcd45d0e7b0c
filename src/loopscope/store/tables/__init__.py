"""The tables of the catalogue in the forms that storage needs."""

from collections.abc import Mapping
from types import MappingProxyType

from loopscope.catalog.registry import TABLES as _DECLARED
from loopscope.store.schema import TableSchema

TABLES: Mapping[str, TableSchema] = MappingProxyType(
    {name: TableSchema.of(spec) for name, spec in _DECLARED.items()}
)
"""Table name → schema."""

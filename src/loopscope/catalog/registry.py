"""Every table, column and gauge. A new table is one file in `tables/` and its name here."""

from collections.abc import Mapping
from types import MappingProxyType

from loopscope.catalog.gauge import Gauge
from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables import (
    attempt,
    health,
    loss,
    probe_loss,
    probe_margin,
    probe_overlap,
    probe_perturbation,
    probe_readout,
    probe_router,
    probe_saturation,
    probe_specialisation,
    residual,
    router,
    system,
    transition,
)

TABLES: Mapping[str, TableSpec] = MappingProxyType(
    {
        module.TABLE.name: module.TABLE
        for module in (
            loss,
            router,
            residual,
            transition,
            probe_router,
            probe_loss,
            probe_overlap,
            probe_readout,
            probe_margin,
            probe_perturbation,
            probe_specialisation,
            probe_saturation,
            health,
            system,
            attempt,
        )
    }
)
"""Table name → its declaration, in the order in which people read them."""

METRICS: Mapping[tuple[str, str], Column] = MappingProxyType(
    {
        (table.name, column.name): column
        for table in TABLES.values()
        for column in table.metrics.values()
        if table is not probe_router.TABLE
    }
)
"""(table, column) → column, of every measured value; those of `probe_router` are the router's."""

TRAINING_METRICS: Mapping[tuple[str, str], Column] = MappingProxyType(
    {key: column for key, column in METRICS.items() if not key[0].startswith("probe_")}
)
"""Those of the tables that training writes."""

GAUGES: Mapping[str, Gauge] = MappingProxyType(
    {gauge.key: gauge for table in TABLES.values() for gauge in table.gauges}
)
"""Key → gauge, in the order of the tables."""

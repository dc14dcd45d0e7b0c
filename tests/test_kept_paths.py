"""Import paths that code outside this repository uses. One that has to go is first announced in the changelog."""

from __future__ import annotations

from importlib import import_module

import pytest

KEPT = {
    "loopscope": ("open_run", "open_runs", "findings", "Loopscope", "AlertConfig", "ParquetCollector"),
    "loopscope.alerts": ("RULES", "AlertConfig"),
    "loopscope.alerts.notice": ("AlertNotice",),
    "loopscope.alerts.webhook": ("Webhook", "payload"),
    "loopscope.analysis.liveness": ("liveness",),
    "loopscope.analysis.run": ("Run",),
    "loopscope.capture": ("proof", "routing"),
    "loopscope.capture.proof": (),
    "loopscope.capture.routing": ("RoutingSpec",),
    "loopscope.capture.spec": ("CapturePlan",),
    "loopscope.capture.transformers_adapter": ("_target",),
    "loopscope.collect.accumulate": ("StepAccumulator",),
    "loopscope.collect.rows": ("step_rows",),
    "loopscope.errors": ("LoopscopeError", "TraceError", "ConfigError"),
    "loopscope.integrations.torchtitan.options": ("LoopscopeOptions",),
    "loopscope.integrations.torchtitan.trainer": ("LoopscopeTrainer",),
    "loopscope.integrations.transformers": ("loopscope_callback",),
    "loopscope.metrics.reduce": ("reduce_visit",),
    "loopscope.metrics.residual.rows": ("residual_rows",),
    "loopscope.models": ("cpu_compat", "toy"),
    "loopscope.models.loopmoe": ("model_registry",),
    "loopscope.models.loopmoe.parallelize": ("annotate_state",),
    "loopscope.service": ("make_app",),
    "loopscope.service.catalog": ("Catalog",),
    "loopscope.service.rows": ("rows",),
    "loopscope.service.views": ("headline",),
    "loopscope.store": ("RunStore", "StoreOptions", "TABLES"),
    "loopscope.store.checksum": ("with_checksum",),
    "loopscope.store.ids": ("uuid7", "this_process"),
    "loopscope.store.locks": ("GRACE_S", "read_holder"),
    "loopscope.store.reader": ("RunReader", "read_table"),
    "loopscope.store.schema": ("TableSchema",),
    "loopscope.store.tables": ("TABLES",),
}
"""Module → what is taken from it."""


@pytest.mark.parametrize(("module", "names"), KEPT.items(), ids=KEPT)
def test_a_kept_path_imports(module: str, names: tuple[str, ...]) -> None:
    found = import_module(module)
    for name in names:
        assert hasattr(found, name) or import_module(f"{module}.{name}")

"""Declarations and computations belong together, and layouts have no holes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loopscope.catalog.registry import TABLES
from loopscope.errors import SchemaError
from loopscope.metrics import finish_visits, pair_layout, registry, visit_layout
from loopscope.metrics.router import load


def test_every_file_of_a_table_computes_declared_columns_and_all_of_them():
    for families in (registry._ROUTER, registry._RESIDUAL, registry._TRANSITION):
        for name, family in families.items():
            assert family.module.endswith(f".{name}")
            assert bool(family.columns) == (family.finish is not None)


def test_a_declared_column_without_code_is_refused(monkeypatch):
    table = TABLES["residual"]
    stray = replace(table.by_name["rms"], name="stray", computed="nowhere")
    grown = {**TABLES, "residual": replace(table, columns=(*table.columns, stray))}
    monkeypatch.setattr(registry, "TABLES", grown)
    with pytest.raises(SchemaError, match="nowhere"):
        registry._families(registry.residual)


def test_code_without_a_declaration_is_refused(monkeypatch):
    def finish(partials):
        return {**load._finish(partials), "load_gini": 0.0}

    stray = replace(load.FAMILY, finish=finish)
    families = tuple(stray if family is load.FAMILY else family for family in registry.visit_families(2))
    monkeypatch.setattr(registry, "visit_families", lambda num_experts: families)
    with pytest.raises(SchemaError, match="load_gini"):
        registry._check()


def test_slots_are_placed_without_gap_or_overlap():
    for layout in (
        visit_layout(0, 0),
        visit_layout(1, 1),
        visit_layout(64, 8),
        pair_layout("step_boundary", True, (8, 2), (8, 2)),
        pair_layout("from_input", False, (8, 2), (16, 2)),
    ):
        for slices, size in ((layout.sum_slices, layout.n_sum), (layout.max_slices, layout.n_max)):
            end = 0
            for part in slices.values():
                assert part.start == end
                assert part.stop > part.start
                end = part.stop
            assert end == size


def test_a_family_that_fails_for_one_visit_costs_that_visit_alone(monkeypatch):
    layout = visit_layout(4, 1)
    sums = np.zeros((3, layout.n_sum))
    sums[:, layout.sum_slices["tokens"]] = 8
    sums[:, layout.sum_slices["count"]] = [[2, 2, 2, 2], [8, 0, 0, 0], [2, 2, 2, 2]]

    def finish(partials):
        if (partials["count"] == 0).any():
            raise RuntimeError("no")
        return finish_load(partials)

    finish_load = load.FAMILY.finish
    monkeypatch.setitem(load.FAMILY.__dict__, "finish", finish)
    done = finish_visits(layout, sums, np.zeros((3, layout.n_max)), score_funcs=["softmax"] * 3)
    assert done.router.values["load_cv"] == [0.0, None, 0.0]
    assert [nulls.get("load_cv") for nulls in done.router.nulls] == [None, "failed", None]
    assert [(i, f.kind) for i, f in done.faults if f.kind == "metric_failed"] == [(1, "metric_failed")]
    assert done.router.values["dead_experts"] == [0, 3, 0]

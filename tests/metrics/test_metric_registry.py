from __future__ import annotations

import re
from pathlib import Path

import pytest

from loopscope.metrics import REGISTRY, pair_layout, visit_layout
from loopscope.metrics.docs import render
from loopscope.metrics.registry import RESIDUAL, ROUTER, TRANSITION
from loopscope.store import TABLES

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_registry_says():
    assert (ROOT / "docs/metrics.md").read_text() == render(), (
        "run: python -m loopscope.metrics.docs > docs/metrics.md"
    )


def test_the_page_names_every_column_once_per_table():
    page = render()
    for table, name in REGISTRY:
        section = page.split(f"\n## `{table}`\n")[1].split("\n## ")[0]
        assert len(re.findall(rf"^\| `{name}` \|", section, re.M)) == 1


@pytest.mark.parametrize("key", REGISTRY)
def test_every_entry_says_everything(key):
    metric = REGISTRY[key]
    assert (metric.table, metric.name) == key
    for text in (metric.formula, metric.unit, metric.merge, metric.source, metric.null_rule):
        assert text.strip()


@pytest.mark.parametrize("family", [*ROUTER, *RESIDUAL, *TRANSITION], ids=lambda f: f.__class__.__name__)
def test_a_family_is_one_table(family):
    assert len({metric.table for metric in family.metrics}) <= 1


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


KEYS = {
    *("run_id", "attempt", "step", "rank", "world_size", "aggregation_scope", "tokens_seen", "elapsed_s"),
    *("wall_time", "null_reasons", "block", "unrolled_pos", "loop_step", "layer_idx", "num_loop_steps"),
    *("num_experts", "top_k", "score_func", "score_space", "num_tokens", "num_microbatches", "kind"),
    *("from_pos", "to_pos", "from_loop_step", "to_loop_step", "from_layer_idx", "to_layer_idx"),
}


@pytest.mark.parametrize("table", ["loss", "router", "residual", "transition"])
def test_the_store_has_these_columns_and_row_keys_only(table):
    stored = {column.name: column.type for column in TABLES[table].columns}
    mine = {name: metric.kind for (owner, name), metric in REGISTRY.items() if owner == table}
    assert {name: kind for name, kind in stored.items() if name not in KEYS} == mine

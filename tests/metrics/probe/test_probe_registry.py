"""Every number of the probe tables is described, and of the type that the store keeps."""

import pytest

from loopscope.metrics import PROBE_REGISTRY, REGISTRY
from loopscope.metrics.docs import render
from loopscope.store import TABLES

KEYS = {
    *("run_id", "attempt", "step", "rank", "world_size", "aggregation_scope", "tokens_seen", "elapsed_s"),
    *("wall_time", "null_reasons", "block", "unrolled_pos", "loop_step", "layer_idx", "num_loop_steps"),
    *(
        "num_experts",
        "top_k",
        "score_func",
        "score_space",
        "num_tokens",
        "num_target_tokens",
        "kind",
        "stratum",
    ),
    *("corpus_name", "corpus_hash", "first_token_dropped", "stratum_kind", "num_documents", "num_items"),
    *("from_loop_step", "to_loop_step", "from_pos", "to_pos", "readout", "quantity", "shuffle_scope"),
    *("num_shuffles", "calibrated", "epsilon", "num_directions", "from_step"),
}
PROBE_TABLES = sorted({table for table, _ in PROBE_REGISTRY})


def test_every_probe_table_is_there():
    assert (
        sorted(name for name in TABLES if name.startswith("probe_") and name != "probe_router")
        == PROBE_TABLES
    )
    assert not set(PROBE_REGISTRY) & set(REGISTRY)


@pytest.mark.parametrize("table", PROBE_TABLES)
def test_the_store_has_these_columns_and_keys_only(table):
    stored = {column.name: column.type for column in TABLES[table].columns if column.name not in KEYS}
    described = {name: metric.kind for (owner, name), metric in PROBE_REGISTRY.items() if owner == table}
    assert stored == described


@pytest.mark.parametrize("key", PROBE_REGISTRY)
def test_every_entry_says_everything(key):
    metric = PROBE_REGISTRY[key]
    for text in (metric.formula, metric.unit, metric.merge, metric.source, metric.null_rule):
        assert text.strip()
    section = render().split(f"\n## `{metric.table}`\n")[1].split("\n## ")[0]
    assert f"| `{metric.name}` |" in section

"""`probe_overlap`: which experts the loop steps of a layer share, over a fixed corpus."""

from functools import partial

from loopscope.catalog.gauge import Gauge
from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import CORPUS_KEYS, CORPUS_TOKENS, ROW_KEY, RUN_KEYS

_int = partial(Column, type="int32")
_overlap = partial(
    Column,
    unit="1",
    needs=("topk_idx",),
    merge="mean by num_tokens",
    source="definition; chance for two independent uniform k-subsets of E",
    null_rule="a visit of the pair failed: failed",
)

GAUGES = (
    Gauge(
        key="probe/overlap_mean",
        table="probe_overlap",
        column="topk_overlap",
        how="mean",
        headline=True,
    ),
)

TABLE = TableSpec(
    name="probe_overlap",
    doc="One row per probe step, physical layer of the loop and pair of loop steps: the overlap matrix.",
    primary_key=(*ROW_KEY, "corpus_hash", "layer_idx", "from_loop_step", "to_loop_step"),
    version=2,
    oldest=2,
    columns=(
        *RUN_KEYS,
        *CORPUS_KEYS,
        _int(name="layer_idx", formula="physical layer in the stack", required=True),
        _int(name="from_loop_step", formula="the earlier pass through the stack", required=True),
        _int(name="to_loop_step", formula="the later pass through the stack", required=True),
        _int(name="from_pos", formula="unrolled_pos of the earlier visit"),
        _int(name="to_pos", formula="unrolled_pos of the later visit"),
        _int(name="num_loop_steps", formula="R really executed"),
        _int(name="num_experts", formula="E of this layer"),
        _int(name="top_k", formula="k of this layer"),
        CORPUS_TOKENS,
        _overlap(
            name="topk_overlap",
            formula="mean_t |S_a ∩ S_b| / k, every pair of loop steps of a layer",
            shown=("probe_diff",),
        ),
        _overlap(name="topk_jaccard", formula="mean_t |S_a ∩ S_b| / |S_a ∪ S_b|", shown=("probe_diff",)),
        _overlap(
            name="load_overlap",
            formula="Σ_e min(f_a,e, f_b,e)",
            merge="from expert_count of both visits",
            shown=("probe_diff",),
        ),
        _overlap(name="overlap_chance", formula="k/E", merge="constant"),
        _overlap(name="jaccard_chance", formula="Σ_m Hypergeom(m; E, k, k)·m/(2k − m)", merge="constant"),
    ),
    gauges=GAUGES,
)

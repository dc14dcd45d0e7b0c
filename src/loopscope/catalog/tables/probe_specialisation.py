"""`probe_specialisation`: what experts are chosen for."""

from functools import partial

from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import PROBE_VISIT_KEYS, VISIT_KEY

_special = partial(
    Column,
    unit="1",
    needs=("topk_idx",),
    merge="not; one number over one corpus",
    source="Muennighoff et al. 2024, arXiv 2409.02060, section 5",
)

TABLE = TableSpec(
    name="probe_specialisation",
    doc="One row per probe step, visit and kind: what experts are chosen for.",
    primary_key=(*VISIT_KEY, "corpus_hash", "kind", "stratum"),
    version=2,
    oldest=2,
    columns=(
        *PROBE_VISIT_KEYS,
        Column(name="kind", type="string", formula="domain, vocabulary or coactivation", required=True),
        Column(
            name="stratum",
            type="string",
            formula="the domain's name; all for the other kinds",
            required=True,
        ),
        _special(
            name="value",
            formula="domain: max_e N_{e,D}/N_D; vocabulary: mean_x max_e N_{e,x}/N_x; coactivation: mean N_ij/N_i over "
            "pairs",
            null_rule="no token occurs 100 times: absent; E = 1: not_applicable",
            shown=("probe_diff",),
        ),
        _special(
            name="chance",
            formula="value where choices and tokens are matched at random, or choices are uniform: k/E; permuted "
            "tokens; (k − 1)/(E − 1)",
            null_rule="as value",
        ),
        _special(
            name="largest",
            formula="coactivation: max over pairs of N_ij/N_i",
            null_rule="other kinds: null",
        ),
        Column(
            name="num_items",
            type="int64",
            formula="tokens of the domain, tokens of the vocabulary, or pairs of experts",
        ),
        _special(
            name="expert_share",
            type="list<float64>",
            formula="domain: N_{e,D}/N_D per expert",
            null_rule="other kinds: null",
        ),
        _special(
            name="pair_count",
            type="list<int64>",
            formula="coactivation: N_ij for i < j row by row, up to E = 64",
            null_rule="other kinds, E > 64: null",
        ),
    ),
)

"""`probe_saturation`: how much of each token's choice stayed the same between two probes."""

from functools import partial

from loopscope.catalog.table import Column, Picture, TableSpec
from loopscope.catalog.tables.keys import PROBE_VISIT_KEYS, VISIT_KEY

_saturation = partial(Column, unit="1", needs=("topk_idx",), merge="not; one number over one corpus")

TABLE = TableSpec(
    name="probe_saturation",
    doc="One row per probe step, visit and earlier probe: how much of each token's choice stayed the same.",
    primary_key=(*VISIT_KEY, "corpus_hash", "from_step"),
    version=2,
    oldest=2,
    columns=(
        *PROBE_VISIT_KEYS,
        Column(name="from_step", type="int64", formula="step of the earlier parameters", required=True),
        _saturation(
            name="saturation",
            formula="mean_t |S ∩ S′|/k, S′ the choice at an earlier probe",
            source="Muennighoff et al. 2024, arXiv 2409.02060, section 5",
            null_rule="never; no row without an earlier deep probe of the same tokens",
            shown=("probe_diff",),
            picture=Picture(
                id="saturation",
                title="Choices that stayed since the deep probe before",
                text="Share of a token's experts that are the same. Towards 1 routing no longer changes; chance gives "
                "k/E.",
                least=0.0,
                most=1.0,
            ),
        ),
        _saturation(
            name="overlap_chance",
            formula="k/E: saturation of independent choices",
            source="definition; chance for two independent uniform k-subsets of E",
            null_rule="never",
        ),
    ),
)

"""`probe_margin`: margins and selection gaps against shuffled scores."""

from functools import partial

from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import PROBE_VISIT_KEYS, VISIT_KEY

_margin = partial(
    Column,
    unit="1",
    needs=("choice_scores",),
    merge="not; one number over one corpus",
    source="definition: permutation null, calibrated by a bootstrap surrogate",
    null_rule="margin at k = 1, gap at k = E: not_applicable; not finite: nonfinite",
)
_interval = partial(_margin, null_rule="fewer than 5 documents: absent; else as rho_cal")

TABLE = TableSpec(
    name="probe_margin",
    doc="One row per probe step, visit and quantity: the margin or selection gap against shuffled scores.",
    primary_key=(*VISIT_KEY, "corpus_hash", "quantity", "shuffle_scope"),
    version=2,
    oldest=2,
    columns=(
        *PROBE_VISIT_KEYS,
        Column(name="score_space", type="string", formula="the scores: logits or selection_scores"),
        Column(
            name="quantity",
            type="string",
            formula="margin: r_(1) − r_(k); selection_gap: r_(k) − r_(k+1)",
            required=True,
        ),
        Column(
            name="shuffle_scope",
            type="string",
            formula="batch or document: where a column is permuted",
            required=True,
        ),
        Column(name="num_shuffles", type="int32", formula="shuffles behind the median"),
        Column(
            name="calibrated",
            type="bool",
            formula="false for bounded scores, whose rho_cal lies outside 1 by nature",
        ),
        _margin(name="observed_mean", formula="mean_t of r_(1) − r_(k), or of r_(k) − r_(k+1)", unit="score"),
        _margin(
            name="null_median",
            formula="median over column shuffles of centred scores of that mean",
            unit="score",
        ),
        _margin(name="rho", formula="observed_mean / null_median", shown=("probe_diff",)),
        _margin(name="rho_ref", formula="rho of columns resampled with replacement and centred again"),
        _margin(name="rho_cal", formula="rho / rho_ref", shown=("probe_diff",)),
        _interval(name="rho_cal_low", formula="2.5% quantile of rho_cal, documents resampled"),
        _interval(name="rho_cal_high", formula="97.5% quantile of rho_cal, documents resampled"),
        _margin(
            name="cell",
            type="string",
            formula="which of the two rho_cal_low exceed 1.03: neither (under-specialised), gap (block), margin "
            "(hierarchical), both (strong)",
            null_rule="one of the two does not exist: not_applicable; else as rho_cal_low",
        ),
    ),
)

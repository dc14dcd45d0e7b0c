"""`probe_perturbation`: how a small disturbance of the loop's input grows."""

from functools import partial

from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import PROBE_VISIT_KEYS, VISIT_KEY

_growth = partial(
    Column,
    unit="1",
    needs=("residual",),
    merge="not; one number over one corpus",
    source="finite-size Lyapunov exponent: growth of a small disturbance per pass",
    null_rule="not finite: nonfinite",
)
_rate = partial(
    _growth,
    null_rule="fewer than two passes, or a distance of 0: not_applicable; not finite: nonfinite",
)

TABLE = TableSpec(
    name="probe_perturbation",
    doc="One row per probe step and loop visit: how a disturbance of the loop's input has grown there.",
    primary_key=(*VISIT_KEY, "corpus_hash"),
    version=2,
    oldest=2,
    columns=(
        *PROBE_VISIT_KEYS,
        Column(name="epsilon", formula="length of the disturbance of a token, as a share of ‖h_t‖"),
        Column(name="num_directions", type="int32", formula="random directions that are averaged"),
        _growth(
            name="relative_distance",
            formula="‖h′ − h‖_F / ‖h‖_F, mean over directions",
            shown=("probe_diff",),
        ),
        _growth(name="relative_distance_min", formula="smallest direction's relative_distance"),
        _growth(name="relative_distance_max", formula="largest direction's relative_distance"),
        _growth(
            name="amplification",
            formula="‖h′ − h‖_F / ‖injected‖_F, mean over directions",
            shown=("probe_diff",),
        ),
        _growth(
            name="flipped_share",
            formula="share of tokens whose expert set changed, mean over directions",
            null_rule="dense layer: not_applicable; not finite: nonfinite",
            shown=("probe_diff",),
        ),
        _rate(name="distance_rate", formula="(‖h′_r − h_r‖_F / ‖h′_0 − h_0‖_F)^(1/r) at one layer"),
        _rate(name="relative_rate", formula="the same of relative_distance"),
    ),
)

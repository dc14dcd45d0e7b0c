"""`loss`: one row per optimizer step."""

from functools import partial

from loopscope.catalog.gauge import Gauge
from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import ROW_KEY, RUN_KEYS

_BAD = "not finite: nonfinite"
_loss = partial(
    Column,
    unit="nats",
    requires=("loss",),
    merge="mean",
    source="the trainer",
    null_rule=_BAD,
)

_gauge = partial(Gauge, table="loss", how="only")

GAUGES = (
    _gauge(
        key="loss/task",
        column="task_loss",
        headline=True,
        title="Task loss",
        text="Cross-entropy of the training tokens, without the auxiliary losses.",
        axis="nats",
    ),
    _gauge(key="loss/total", column="total_loss", headline=True),
    _gauge(key="loss/closure_error", column="closure_error"),
    _gauge(key="moe/lb_loss", column="lb_loss", headline=True),
    _gauge(key="moe/z_loss", column="z_loss"),
    _gauge(
        key="optim/grad_norm",
        column="grad_norm",
        title="Gradient norm",
        text="Before clipping.",
        axis="norm",
    ),
    _gauge(key="optim/lr", column="lr"),
)

TABLE = TableSpec(
    name="loss",
    doc="One row per optimizer step: the loss taken apart, in nats.",
    primary_key=ROW_KEY,
    version=2,
    oldest=2,
    columns=(
        *RUN_KEYS,
        _loss(
            name="task_loss",
            formula="cross-entropy before any auxiliary term",
            merge="mean by num_target_tokens",
            shown=("summary", "diff"),
        ),
        _loss(
            name="lb_loss",
            formula="equal-weight mean of E·Σ f_e·P_e over visits, microbatches, ranks",
            unit="1",
            requires=("aux_loss",),
            null_rule=f"the objective has none, or it is not told: absent; {_BAD}",
            shown=("summary", "diff"),
        ),
        _loss(name="lb_loss_factor", formula="factor of lb_loss in the total", unit="1", merge="constant"),
        _loss(
            name="z_loss",
            formula="equal-weight mean of mean z² over visits, microbatches, ranks",
            unit="nats²",
            requires=("aux_loss",),
            null_rule=f"the objective has none, or it is not told: absent; {_BAD}",
            shown=("summary", "diff"),
        ),
        _loss(name="z_loss_factor", formula="factor of z_loss in the total", unit="1", merge="constant"),
        _loss(
            name="total_loss",
            formula="what backward ran on, its scaling undone",
            merge="mean by num_target_tokens",
            shown=("summary", "diff"),
        ),
        _loss(
            name="task_loss_sum",
            formula="Σ cross-entropy over target tokens",
            merge="sum",
            null_rule=f"not handed over: absent; {_BAD}",
        ),
        _loss(
            name="num_target_tokens",
            type="int64",
            formula="target tokens",
            unit="tokens",
            merge="sum",
            null_rule="not handed over: absent",
        ),
        _loss(
            name="other_loss",
            formula="further declared terms, already weighted",
            null_rule=f"none declared: absent; {_BAD}",
        ),
        _loss(
            name="grad_norm",
            formula="norm of the gradient before clipping",
            unit="1",
            requires=("grad_norm",),
            merge="constant",
            null_rule=f"not known: absent; {_BAD}",
            shown=("summary", "diff"),
        ),
        _loss(
            name="lr",
            formula="learning rate of the step",
            unit="1",
            requires=("lr",),
            merge="constant",
            null_rule=f"not known: absent; {_BAD}",
            shown=("summary",),
        ),
        _loss(
            name="closure_error",
            formula="total − (task + lb_factor·lb + z_factor·z + other)",
            null_rule="a component is made from the others: absent; one is not finite: nonfinite",
        ),
        _loss(
            name="nonfinite_fields",
            type="string",
            formula="names of the components that are not finite, comma-separated",
            unit="names",
            merge="union",
            null_rule="null when all are finite",
        ),
    ),
    gauges=GAUGES,
)

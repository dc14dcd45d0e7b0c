"""`loss`: one row per optimizer step."""

from __future__ import annotations

from loopscope.store.schema import Column, TableSchema
from loopscope.store.tables.keys import ROW_KEY, RUN_KEYS, counts, floats

LOSS = TableSchema(
    name="loss",
    doc="One row per optimizer step: the loss taken apart, in nats.",
    primary_key=ROW_KEY,
    columns=(
        *RUN_KEYS,
        *floats("task_loss", "cross-entropy before any auxiliary term"),
        *floats("lb_loss", "load-balancing loss as the objective used it, before its factor"),
        *floats("lb_loss_factor", "factor of lb_loss in the total"),
        *floats("z_loss", "router z-loss as the objective used it, before its factor"),
        *floats("z_loss_factor", "factor of z_loss in the total"),
        *floats("total_loss", "what backward ran on, its scaling undone"),
        *floats("task_loss_sum", "summed cross-entropy over the target tokens"),
        *counts("num_target_tokens", "tokens with a target"),
        *floats("other_loss", "further declared terms, already weighted; null where none is declared"),
        *floats("grad_norm", "norm of the gradient before clipping"),
        *floats("lr", "learning rate of the update"),
        *floats("closure_error", "total − (task + f_lb·lb + f_z·z + other)"),
        Column("nonfinite_fields", "string", "comma-separated non-finite components; null when none"),
    ),
)

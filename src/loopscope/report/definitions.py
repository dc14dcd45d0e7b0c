"""What the drawn columns mean: the documentation that travels with the file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loopscope.store import TABLES

_UNITS = {
    "task_loss": "nats", "total_loss": "nats", "other_loss": "nats", "closure_error": "nats", "z_loss": "nats²",
    "lb_loss": "1", "lb_loss_factor": "1", "z_loss_factor": "1", "grad_norm": "1", "lr": "1",
    "load_entropy_ratio": "1", "maxvio_count": "1", "dead_experts": "experts", "margin_p50": "score",
    "z_mean": "nats", "token_entropy_ratio": "1", "expert_count": "assignments", "norm_mean": "activation",
    "relative_delta": "1", "growth": "1", "state_cosine": "1", "token_correlation": "1", "topk_overlap": "1",
    "overlap_chance": "1", "loss_mean": "nats per token", "tokens_seen": "tokens", "elapsed_s": "s",
    "kl_from_previous": "nats", "argmax_settled": "1", "rho_cal": "1", "amplification": "1",
    "event": "text", "value": "depends on the event",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """One column, for the glossary at the end of the page."""

    table: str
    name: str
    formula: str
    unit: str

    @property
    def anchor(self) -> str:
        """Identifier in the page."""
        return f"m-{self.table}-{self.name}"


def definition(table: str, name: str) -> Definition:
    """The column's definition, from the registry of tables; empty where the registry says nothing."""
    columns = TABLES[table].columns if table in TABLES else ()
    formula = next((column.doc for column in columns if column.name == name), "")
    return Definition(table=table, name=name, formula=formula, unit=_UNITS.get(name, "1"))


def glossary(metrics: Iterable[tuple[str, str]]) -> list[Definition]:
    """Each drawn column once, in the order of the tables."""
    order = list(TABLES)
    return [
        definition(*m)
        for m in sorted(set(metrics), key=lambda m: (order.index(m[0]) if m[0] in order else 99, m))
    ]

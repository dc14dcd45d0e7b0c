"""Rows whose every value follows from their step and position, so that a wrong one is known at sight."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

POSITIONS = 3
EXPERTS = 4


def loss_row(step: int, salt: int = 0) -> dict[str, Any]:
    return {
        "step": step,
        "rank": 0,
        "world_size": 1,
        "aggregation_scope": "global",
        "task_loss": 10.0 / (step + 1) + salt,
        "total_loss": 20.0 / (step + 1) + salt,
        "grad_norm": step * 0.125,
        "num_target_tokens": step * 1000 + salt,
    }


def router_row(step: int, position: int, salt: int = 0) -> dict[str, Any]:
    return {
        "step": step,
        "rank": 0,
        "aggregation_scope": "global",
        "block": "loop",
        "unrolled_pos": position,
        "num_experts": EXPERTS,
        "top_k": 2,
        "num_tokens": step + position,
        "expert_count": [step + position + e for e in range(EXPERTS)],
        "expert_mass": [(step + e) * 0.5 for e in range(EXPERTS)],
        "token_entropy_mean": step / (position + 2) + salt,
    }


def write_step(writer: Any, step: int, salt: int = 0) -> int:
    """One step's rows; returns how many."""
    writer.append("loss", loss_row(step, salt))
    for position in range(POSITIONS):
        writer.append("router", router_row(step, position, salt))
    return 1 + POSITIONS


def wrong_rows(table: str, rows: pa.Table, salt: int = 0) -> list[dict[str, Any]]:
    """Rows with a value that was never written."""
    wrong = []
    for row in rows.to_pylist():
        if table == "loss":
            expected = loss_row(row["step"], salt)
        else:
            expected = router_row(row["step"], row["unrolled_pos"], salt)
        if any(row[name] != value for name, value in expected.items()):
            wrong.append(row)
    return wrong

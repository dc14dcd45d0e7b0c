from __future__ import annotations

from pathlib import Path

from fault_rollbacks import run_rollbacks


def test_every_history_has_exactly_one_live_row_per_step_and_position(fast_tmp: Path) -> None:
    figures = run_rollbacks(fast_tmp, histories=12, seed=5)
    assert figures["died_empty"] > 0
    wrong = {k: figures[k] for k in ("wrong_live", "doubled", "stale", "sql")}
    assert wrong == dict.fromkeys(wrong, 0)

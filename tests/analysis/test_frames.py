"""Frames of pandas: what was written is what is read, whatever is missing beside it."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from loopscope import Run, open_run
from loopscope.errors import ConfigError
from loopscope.store import RunStore

BIG = 2**53 + 1


@pytest.fixture(scope="module", params=["some missing", "none missing"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, list[dict[str, Any]]]:
    root: Path = tmp_path_factory.mktemp("frames") / "run"
    rows: list[dict[str, Any]] = [
        {"step": BIG, "task_loss": 0.1, "tokens_seen": BIG, "num_target_tokens": -BIG},
        {"step": BIG + 2, "task_loss": 0.2, "tokens_seen": 2**62 + 1, "num_target_tokens": 2**63 - 1},
    ]
    if request.param == "some missing":
        rows += [{"step": BIG + 4, "task_loss": None, "tokens_seen": None}]
    with RunStore.create(root) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        writer.append_many("loss", rows)
        writer.append("router", {"step": 1, "unrolled_pos": 0, "expert_count": [BIG, 0]})
        drops = [True, None] if request.param == "some missing" else [True, False]
        for step, dropped in enumerate(drops, 1):
            row = {"step": step, "unrolled_pos": 0, "corpus_hash": "x", "first_token_dropped": dropped}
            writer.append("probe_router", row)
    return open_run(root), rows


@pytest.mark.parametrize("backend", [None, "numpy_nullable", "pyarrow"])
def test_integers_keep_their_digits_and_what_is_missing_is_missing(case: Any, backend: Any) -> None:
    run, rows = case
    frame = run.pandas("loss", dtype_backend=backend)
    for name in ("step", "tokens_seen", "num_target_tokens", "task_loss"):
        found = [None if pd.isna(value) else value for value in frame[name]]
        assert found == [row.get(name) for row in rows], name
    assert frame["rank"].isna().all()
    assert list(run.pandas("router", dtype_backend=backend)["expert_count"].iloc[0]) == [BIG, 0]
    dropped = run.pandas("probe_router", dtype_backend=backend)["first_token_dropped"]
    assert bool(dropped.iloc[0]) is True
    assert pd.isna(dropped.iloc[1]) == (len(rows) == 3)


@pytest.mark.parametrize(
    ("backend", "step", "tokens", "loss", "rank"),
    [
        (None, "int64", "Int64", "float64", "Int32"),
        ("numpy_nullable", "Int64", "Int64", "Float64", "Int32"),
        ("pyarrow", "int64[pyarrow]", "int64[pyarrow]", "double[pyarrow]", "int32[pyarrow]"),
    ],
)
def test_a_type_does_not_depend_on_the_rows(
    case: Any, backend: Any, step: str, tokens: str, loss: str, rank: str
) -> None:
    frame = case[0].pandas("loss", dtype_backend=backend)
    assert [str(frame[name].dtype) for name in ("step", "tokens_seen", "task_loss", "rank")] == [
        step,
        tokens,
        loss,
        rank,
    ]
    assert str(case[0].pandas("probe_router").dtypes["first_token_dropped"]) == "boolean"
    assert isinstance(frame["wall_time"].iloc[0], pd.Timestamp)


def test_another_backend_is_refused(case: Any) -> None:
    with pytest.raises(ConfigError, match="'numpy'"):
        case[0].pandas("loss", dtype_backend="numpy")

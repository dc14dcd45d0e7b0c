"""The physical layers of the loop, with their loop steps taken together."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from loopscope.analysis.records import list_groups
from loopscope.analysis.run import Run
from loopscope.analysis.scope import scope_of

_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("layer_idx", pa.int32()),
        ("num_loop_steps", pa.int32()),
        ("num_experts", pa.int32()),
        ("top_k", pa.int32()),
        ("expert_count", pa.list_(pa.int64())),
        ("load", pa.list_(pa.list_(pa.int64()))),
        ("dead_everywhere", pa.list_(pa.int32())),
        ("loop_mutual_information", pa.float64()),
    ]
)


def layer_load(run: Run) -> pa.Table:
    """One row per traced step and physical layer of the loop, over the visits that were counted.

    Loop steps of one layer share its experts, so their counts may be added up; counts of different layers never
    are, for expert 3 of one layer is a stranger to expert 3 of another.

    Returns:
        `step`, `layer_idx`, `num_experts` (E), `top_k`;
        `num_loop_steps`: loop steps behind the row, R where none is missing;
        `expert_count` [E]: assignments per expert, added up over the loop steps;
        `load` [R][E]: the same per loop step, in their order;
        `dead_everywhere`: experts without an assignment at any loop step;
        `loop_mutual_information`: I(expert; loop step) of an assignment, nats, from the counts themselves. 0: every
        loop step uses the experts alike; at most ln min(R, E). Null without an assignment.
    """
    if "router" not in run.tables:
        return _SCHEMA.empty_table()
    rows = run.sql(
        "select step, layer_idx, num_experts, top_k, expert_count from router "
        f"where {scope_of(run, 'router').where} and block = 'loop' and expert_count is not null "
        "order by step, layer_idx, loop_step"
    ).to_arrow_table()
    names = ("step", "layer_idx", "num_experts", "top_k")
    found = [
        {
            **dict(zip(names, key, strict=True)),
            "num_loop_steps": len(counts_RE),
            "expert_count": counts_RE.sum(axis=0),
            "load": counts_RE.tolist(),
            "dead_everywhere": np.flatnonzero(~counts_RE.any(axis=0)),
            "loop_mutual_information": _mutual_information(counts_RE),
        }
        for key, _, counts_RE in list_groups(rows, names, "expert_count")
    ]
    return pa.Table.from_pylist(found, schema=_SCHEMA)


def _mutual_information(counts_RE: npt.NDArray[np.int64]) -> float | None:
    """I(expert; loop step) in nats; None without an assignment."""
    total = counts_RE.sum()
    if total == 0:
        return None
    joint_RE = counts_RE / total
    apart_RE = joint_RE.sum(axis=1, keepdims=True) * joint_RE.sum(axis=0, keepdims=True)
    there = joint_RE > 0
    # Independence gives rounding noise of either sign; information is never negative.
    return max(0.0, float((joint_RE[there] * np.log(joint_RE[there] / apart_RE[there])).sum()))

"""Which experts die, when and where: stretches of traces in which an expert got no token."""

from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from loopscope.analysis.records import list_groups
from loopscope.analysis.run import Run
from loopscope.analysis.scope import scope_of
from loopscope.errors import ConfigError

_PLACE = ("block", "loop_step", "layer_idx", "num_experts")
_SCHEMA = pa.schema(
    [
        ("block", pa.string()),
        ("loop_step", pa.int32()),
        ("layer_idx", pa.int32()),
        ("num_experts", pa.int32()),
        ("expert", pa.int32()),
        ("since", pa.int64()),
        ("until", pa.int64()),
        ("traces", pa.int64()),
        ("due", pa.float64()),
    ]
)
# Outside the loop a layer is known by its place within its block: the tail's depth depends on R.
_QUERY = """
    select block, loop_step,
        coalesce(layer_idx, unrolled_pos - min(unrolled_pos) over (partition by step, block)) as layer_idx,
        num_experts, step, expert_count
    from router where {where} and expert_count is not null and num_experts > 0
    order by block, layer_idx, loop_step, num_experts, step
"""


def expert_deaths(run: Run, *, expected: float = 100.0) -> pa.Table:
    """Every stretch of traces in which an expert got no token though many were due: dead, not unlucky.

    An expert is due Σc/E assignments per trace, its fair share. With `due` of them expected and none seen, chance
    alone would give that with probability e^-due.

    Args:
        run: an opened run.
        expected: assignments that must have been due over the stretch; 100 is the bound of the alert rule.

    Returns:
        One row per stretch, in the order of `since`: `block`, `loop_step` and `layer_idx` of the visit (outside the
        loop `loop_step` is null and `layer_idx` counts within the block), `num_experts`, `expert`;
        `since`: first traced step of the stretch; `until`: the traced step at which a token came again, null where it
        was still dead at the last trace; `traces` without a token; `due` assignments over them.

    Raises:
        ConfigError: `expected` is not above 0.
    """
    if not expected > 0:
        raise ConfigError(f"expected is {expected!r}, expected a number above 0, such as 100.0")
    if "router" not in run.tables:
        return _SCHEMA.empty_table()
    rows = run.sql(_QUERY.format(where=scope_of(run, "router").where)).to_arrow_table()
    steps = rows["step"].to_numpy()
    found = [
        {**dict(zip(_PLACE, place, strict=True)), **stretch}
        for place, at, counts_TE in list_groups(rows, _PLACE, "expert_count")
        for stretch in _stretches(steps[at], counts_TE, expected)
    ]
    return pa.Table.from_pylist(sorted(found, key=itemgetter("since")), schema=_SCHEMA)


def _stretches(
    steps_T: npt.NDArray[np.int64], counts_TE: npt.NDArray[np.int64], expected: float
) -> list[dict[str, Any]]:
    """Stretches of one visit; T traces in order, E experts."""
    # Whole numbers until the end: sums of thirds would fall short of a bound that is met exactly.
    summed_T = np.concatenate([[0], np.cumsum(counts_TE.sum(axis=1))])
    found = []
    for expert in np.flatnonzero((counts_TE == 0).any(axis=0)):
        silent_T = np.concatenate([[False], counts_TE[:, expert] == 0, [False]])
        edges = np.flatnonzero(silent_T[1:] != silent_T[:-1]).tolist()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            due = float(summed_T[end] - summed_T[begin]) / counts_TE.shape[1]
            if due >= expected:
                found.append(
                    {
                        "expert": int(expert),
                        "since": int(steps_T[begin]),
                        "until": int(steps_T[end]) if end < len(steps_T) else None,
                        "traces": end - begin,
                        "due": due,
                    }
                )
    return found

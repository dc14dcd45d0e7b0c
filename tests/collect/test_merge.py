"""What the catalogue says of merging is true: rows of several ranks give the global row, from what is stored alone."""

import json
import math

import numpy as np
import pytest
import torch
from collect_helpers import meta, sink, specs
from rank_helpers import ranks

from loopscope import ParquetCollector
from loopscope.catalog.registry import TABLES as CATALOG
from loopscope.collect import MemoryWriter, RowContext
from loopscope.metrics.histogram import quantile
from loopscope.trace import TracePoint

RANKS, MICROBATCHES = 3, 2
TABLES = {"router": "unrolled_pos", "residual": "unrolled_pos", "transition": ("kind", "from_pos", "to_pos")}


def weighted(rows, name, weight):
    """Σ value·weight / Σ weight over the rows that have a value."""
    pairs = [(row[name], weight(row)) for row in rows if row[name] is not None]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None


def tokens(row):
    return row["num_tokens"]


def merged_by(weight):
    """`num_tokens`, `filled_microbatches`, or `num_tokens less growth_excluded`."""
    column, _, less = weight.partition(" less ")
    return lambda row: (row[column] or 0) - ((row[less] or 0) if less else 0)


def mean_by(name, weight):
    def merged(rows, _):
        values = [(np.asarray(r[name], float), merged_by(weight)(r)) for r in rows if r[name] is not None]
        whole = sum(w for _, w in values)
        return (sum(v * w for v, w in values) / whole).tolist() if whole else None

    return merged


def root_mean_square(name):
    def merged(rows, _):
        square = weighted([{**r, "s": None if r[name] is None else r[name] ** 2} for r in rows], "s", tokens)
        return None if square is None else math.sqrt(square)

    return merged


def total(name):
    return lambda rows, _: sum(row[name] for row in rows if row[name] is not None)


def lists(name):
    return lambda rows, _: np.sum([row[name] for row in rows if row[name] is not None], axis=0).tolist()


def extreme(name, which):
    return lambda rows, _: which((row[name] for row in rows if row[name] is not None), default=None)


def from_count(formula):
    def merged(rows, done):
        count = np.array(done["expert_count"], dtype=float)
        return float(formula(count, count / count.sum()))

    return merged


def entropy(f):
    return float(-(f[f > 0] * np.log(f[f > 0])).sum())


def z_std(rows, done):
    return math.sqrt(max(done["z_sq_mean"] - done["z_mean"] ** 2, 0.0))


def over_count(done):
    u = np.array(done["expert_count"]) / np.mean(done["expert_count"])
    return u - 1


def over_mass(done):
    return np.array(done["expert_mass"]) / np.mean(done["expert_mass"]) - 1


E, K = "num_experts", "top_k"


def quantile_of(hist, q):
    return lambda rows, done: quantile(np.array(done[hist], dtype=float)[None], q)[0]


def contraction(rows, done):
    """Σ‖D_r‖ / Σ‖D_{r−1}‖: both are sums that stored means stand for, in this row and in the boundary before."""
    now = sum(r["delta_norm_mean"] * tokens(r) for r in rows if r["delta_norm_mean"] is not None)
    before = [r["_before"] for r in rows]
    if any(b is None for b in before):
        return None
    return now / sum(b["delta_norm_mean"] * tokens(b) for b in before if b["delta_norm_mean"] is not None)


def load_overlap(rows, done):
    """From both visits' expert_count, which the router rows hold."""
    first, second = (np.sum([r[side] for r in rows], axis=0) for side in ("_from_count", "_to_count"))
    return float(np.minimum(first / first.sum(), second / second.sum()).sum())


# How each column that the catalogue says is computed anew follows from merged ones: independent closed forms.
ANEW = {
    "load_entropy_ratio": from_count(lambda c, f: entropy(f) / math.log(len(c))),
    "effective_experts": from_count(lambda c, f: math.exp(entropy(f))),
    "load_kl_uniform": from_count(lambda c, f: math.log(len(c)) - entropy(f)),
    "load_cv": from_count(lambda c, f: c.std() / c.mean()),
    "dead_experts": from_count(lambda c, f: (c == 0).sum()),
    "maxvio_count": lambda rows, done: over_count(done).max(),
    "minvio_count": lambda rows, done: over_count(done).min(),
    "avgvio_count": lambda rows, done: np.abs(over_count(done)).mean(),
    "maxvio_mass": lambda rows, done: over_mass(done).max(),
    "mass_to_count_ratio": lambda rows, done: over_mass(done).max() / over_count(done).max(),
    "dead_expected": lambda rows, done: rows[0][E] * (1 - rows[0][K] / rows[0][E]) ** sum(map(tokens, rows)),
    "lb_loss": lambda rows, done: (
        rows[0][E] * (np.array(done["expert_count"]) / sum(done["expert_count"]) * done["mean_prob"]).sum()
    ),
    "mutual_information": lambda rows, done: (
        entropy(np.array(done["mean_prob"])) - done["token_entropy_mean"]
    ),
    "margin_p25": quantile_of("margin_hist", 0.25),
    "margin_p50": quantile_of("margin_hist", 0.5),
    "margin_p75": quantile_of("margin_hist", 0.75),
    "selection_gap_p01": quantile_of("selection_gap_hist", 0.01),
    "z_std": z_std,
    "contraction": contraction,
    "load_overlap": load_overlap,
}


def rule_of(column):
    """What `Column.merge` says, as a function of the ranks' rows and of what is merged already."""
    name, merge = column.name, column.merge
    if merge.startswith("from "):
        return ANEW[name]
    if merge in ("constant", "last"):
        return lambda rows, _: next((r[name] for r in rows if r[name] is not None), None)
    if merge == "sum":
        return (lists if column.type.startswith("list") else total)(name)
    if merge in ("max", "min"):
        return extreme(name, {"max": max, "min": min}[merge])
    kind, _, weight = merge.partition(" by ")
    assert weight, merge
    if kind == "root mean square":
        return root_mean_square(name)
    assert kind == "mean", merge
    return mean_by(name, weight)


def rules_of(table):
    """Column → rule; what is computed anew comes after what it is computed from."""
    columns = sorted(CATALOG[table].metrics.values(), key=lambda c: c.merge.startswith("from "))
    return {column.name: rule_of(column) for column in columns}


RULES = {table: rules_of(table) for table in TABLES}


def window(seed):
    """A traced forward with a bias and scores of its own, some tokens without a state, and sequences of one token."""
    found = sink(seed=seed, batch=3, seq=4)
    for position, point in list(found.items()):
        generator = torch.Generator().manual_seed(seed * 77 + position)
        bias = torch.linspace(-1, 1, point.num_experts)
        scores = point.router_logits + bias
        idx = scores.topk(point.top_k, dim=-1).indices
        weights = point.router_probs.gather(-1, idx)
        residual = point.residual * torch.rand(3, 4, 1, generator=generator)
        residual[0, 0] = 0.0
        fields = {name: getattr(point, name) for name in point.__dataclass_fields__}
        fields |= {
            "selection_scores": scores,
            "expert_bias": bias,
            "topk_idx": idx,
            "topk_weights": weights / weights.sum(-1, keepdim=True),
            "residual": residual,
        }
        found[position] = TracePoint(**fields)
    return found


def masks(seed):
    """Ranks of different numbers of tokens, and one microbatch without any."""
    generator = torch.Generator().manual_seed(seed)
    found = [[torch.rand(3, 4, generator=generator) < 0.7 for _ in range(MICROBATCHES)] for _ in range(RANKS)]
    found[1][0][:] = False
    return found


@pytest.fixture(scope="module", params=[0, 1])
def both(request):
    """(rows by rank, global rows) of the same step."""
    seed = request.param
    valid = masks(seed)
    alone = []
    writer, made, _ = ranks(RANKS)
    for rank in reversed(range(RANKS)):
        own = MemoryWriter()
        local = ParquetCollector(
            own,
            context=RowContext(run_id="r", rank=rank, world_size=RANKS),
            expected_visits=specs(),
            on_error="raise",
        )
        for number in range(MICROBATCHES):
            for collector in (local, made[rank]):
                collector.on_trace_step(
                    1,
                    window(10 * seed + MICROBATCHES * rank + number),
                    meta(),
                    valid=valid[rank][number],
                    microbatch=number,
                    num_microbatches=MICROBATCHES,
                )
        alone.append(own)
    return alone, writer


def key(table, row):
    names = TABLES[table]
    return tuple(row[name] for name in ((names,) if isinstance(names, str) else names))


def beside(writers, row):
    """A transition row with what other stored rows say of its visits."""
    writer, found = writers, dict(row)
    router = {r["unrolled_pos"]: r for r in writer.tables["router"]}
    if row["from_pos"] in router and row["to_pos"] in router:
        found["_from_count"] = router[row["from_pos"]]["expert_count"]
        found["_to_count"] = router[row["to_pos"]]["expert_count"]
        found["_e"], found["_k"] = router[row["to_pos"]][E], router[row["to_pos"]][K]
    found["_before"] = next(
        (
            r
            for r in writer.tables["transition"]
            if r["kind"] == row["kind"] == "step_boundary" and r["to_pos"] == row["from_pos"]
        ),
        None,
    )
    return found


@pytest.mark.parametrize("table", TABLES)
def test_merged_rows_are_the_global_row(both, table):
    alone, writer = both
    values = 0
    for expected in writer.tables[table]:
        rows = [
            beside(own, row) if table == "transition" else row
            for own in alone
            for row in own.tables[table]
            if key(table, row) == key(table, expected)
        ]
        assert len(rows) == RANKS
        nulls = json.loads(expected["null_reasons"] or "{}")
        done = {}
        for name, rule in RULES[table].items():
            if name in nulls:
                assert all(row[name] is None for row in rows), name
                continue
            done[name] = rule(rows, done)
            # Lists of shares and masses are stored in float32, and so is what follows from them.
            assert done[name] == pytest.approx(expected[name], rel=2e-6, abs=1e-6), (
                name,
                key(table, expected),
            )
            values += 1
    assert values > 50

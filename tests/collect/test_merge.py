"""What the registry says of merging is true: rows of several ranks give the global row, from what is stored alone."""

import json
import math

import numpy as np
import pytest
import torch
from collect_helpers import meta, sink, specs
from rank_helpers import ranks

from loopscope import ParquetCollector
from loopscope.collect import MemoryWriter, RowContext
from loopscope.metrics import REGISTRY
from loopscope.metrics.histogram import quantile
from loopscope.metrics.transition.overlap import jaccard_chance
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


def mean(name):
    return lambda rows, _: weighted(rows, name, tokens)


def mean_by(name, weight):
    return lambda rows, _: weighted(rows, name, lambda row: row[weight] or 0)


def mean_without(name):
    return lambda rows, _: weighted(
        rows, name, lambda row: row["num_tokens"] - (row[f"{name}_excluded"] or 0)
    )


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


def mean_prob(rows, _):
    parts = [(np.array(r["mean_prob"]), r["num_tokens"]) for r in rows if r["mean_prob"] is not None]
    return (sum(p * t for p, t in parts) / sum(t for _, t in parts)).tolist()


def z_std(rows, done):
    return math.sqrt(max(done["z_sq_mean"] - done["z_mean"] ** 2, 0.0))


def over_count(done):
    u = np.array(done["expert_count"]) / np.mean(done["expert_count"])
    return u - 1


def over_mass(done):
    return np.array(done["expert_mass"]) / np.mean(done["expert_mass"]) - 1


E, K = "num_experts", "top_k"
ROUTER = {
    "expert_count": lists("expert_count"),
    "expert_mass": lists("expert_mass"),
    "margin_hist": lists("margin_hist"),
    "selection_gap_hist": lists("selection_gap_hist"),
    "mean_prob": mean_prob,
    "load_entropy_ratio": from_count(lambda c, f: entropy(f) / math.log(len(c))),
    "effective_experts": from_count(lambda c, f: math.exp(entropy(f))),
    "load_kl_uniform": from_count(lambda c, f: math.log(len(c)) - entropy(f)),
    "load_cv": from_count(lambda c, f: c.std() / c.mean()),
    "dead_experts": from_count(lambda c, f: (c == 0).sum()),
    "maxvio_count": lambda rows, done: over_count(done).max(),
    "minvio_count": lambda rows, done: over_count(done).min(),
    "avgvio_count": lambda rows, done: np.abs(over_count(done)).mean(),
    "maxvio_micro_mean": mean("maxvio_micro_mean"),
    "maxvio_rank_max": extreme("maxvio_rank_max", max),
    "maxvio_mass": lambda rows, done: over_mass(done).max(),
    "mass_to_count_ratio": lambda rows, done: over_mass(done).max() / over_count(done).max(),
    "dead_expected": lambda rows, done: rows[0][E] * (1 - rows[0][K] / rows[0][E]) ** sum(map(tokens, rows)),
    "dropped_assignments": lambda rows, done: None,
    "lb_loss": lambda rows, done: (
        rows[0][E] * (np.array(done["expert_count"]) / sum(done["expert_count"]) * done["mean_prob"]).sum()
    ),
    "lb_loss_micro_mean": mean_by("lb_loss_micro_mean", "filled_microbatches"),
    "filled_microbatches": total("filled_microbatches"),
    "token_entropy_mean": mean("token_entropy_mean"),
    "token_entropy_ratio": mean("token_entropy_ratio"),
    "mutual_information": lambda rows, done: (
        entropy(np.array(done["mean_prob"])) - done["token_entropy_mean"]
    ),
    "top1_prob_mean": mean("top1_prob_mean"),
    "topk_mass_mean": mean("topk_mass_mean"),
    "margin_mean": mean("margin_mean"),
    "margin_min": extreme("margin_min", min),
    "margin_p25": lambda rows, done: quantile(np.array(done["margin_hist"], dtype=float), 0.25),
    "margin_p50": lambda rows, done: quantile(np.array(done["margin_hist"], dtype=float), 0.5),
    "margin_p75": lambda rows, done: quantile(np.array(done["margin_hist"], dtype=float), 0.75),
    "selection_gap_mean": mean("selection_gap_mean"),
    "selection_gap_min": extreme("selection_gap_min", min),
    "selection_gap_p01": lambda rows, done: quantile(np.array(done["selection_gap_hist"], dtype=float), 0.01),
    "z_mean": mean("z_mean"),
    "z_sq_mean": mean("z_sq_mean"),
    "z_std": z_std,
    "z_min": extreme("z_min", min),
    "z_max": extreme("z_max", max),
    "z_frac_negative": mean("z_frac_negative"),
    "logit_rms": root_mean_square("logit_rms"),
    "logit_abs_max": extreme("logit_abs_max", max),
    "nonfinite_count": total("nonfinite_count"),
    "expert_bias": lambda rows, _: next(r["expert_bias"] for r in rows if r["expert_bias"] is not None),
    "bias_jaccard": mean("bias_jaccard"),
}
RESIDUAL = {
    "norm_mean": mean("norm_mean"),
    "rms": root_mean_square("rms"),
    "abs_max": extreme("abs_max", max),
    "nonfinite_count": total("nonfinite_count"),
    "token_correlation": mean_by("token_correlation", "token_correlation_pairs"),
    "token_correlation_excluded": total("token_correlation_excluded"),
    "token_correlation_pairs": total("token_correlation_pairs"),
}


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


TRANSITION = {
    "delta_norm_mean": mean("delta_norm_mean"),
    "relative_delta": mean_without("relative_delta"),
    "growth": mean_without("growth"),
    "state_cosine": mean_without("state_cosine"),
    "update_cosine": mean_without("update_cosine"),
    "acceleration": mean("acceleration"),
    "contraction": contraction,
    "input_distance": mean("input_distance"),
    "topk_overlap": mean("topk_overlap"),
    "topk_jaccard": mean("topk_jaccard"),
    "load_overlap": load_overlap,
    "overlap_chance": lambda rows, _: rows[0]["_k"] / rows[0]["_e"],
    "jaccard_chance": lambda rows, _: jaccard_chance(rows[0]["_e"], rows[0]["_k"]),
    "nonfinite_count": total("nonfinite_count"),
    **{
        f"{name}_excluded": total(f"{name}_excluded")
        for name in ("relative_delta", "growth", "state_cosine", "update_cosine")
    },
}
RULES = {"router": ROUTER, "residual": RESIDUAL, "transition": TRANSITION}


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
def test_every_column_that_claims_to_merge_has_a_rule(table):
    assert RULES[table].keys() == {name for of_table, name in REGISTRY if of_table == table}


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

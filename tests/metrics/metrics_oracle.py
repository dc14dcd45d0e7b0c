"""What every column must be, token by token in NumPy/SciPy float64; shares no code with the implementation."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import special, stats

EDGES = np.array([0.0] + [2.0**e for e in np.arange(-16, 15.25, 0.5)] + [np.inf])


def f64(x):
    return None if x is None else x.detach().double().numpy()


def flat(x):
    return x.reshape(-1, x.shape[-1])


def entropy(p):
    return float(stats.entropy(np.asarray(p, dtype=np.float64)))


def load_columns(counts, tokens, experts, k):
    share = counts / counts.sum()
    u = share * experts
    h = entropy(counts)
    return {
        "expert_count": counts.astype(int).tolist(),
        "load_entropy_ratio": h / math.log(experts) if experts > 1 else None,
        "effective_experts": math.exp(h),
        "load_kl_uniform": float(special.rel_entr(share, np.full(experts, 1 / experts)).sum()),
        "load_cv": float(stats.variation(counts)),
        "maxvio_count": u.max() - 1,
        "minvio_count": u.min() - 1,
        "avgvio_count": np.abs(u - 1).mean(),
        "maxvio_micro_mean": u.max() - 1,
        "maxvio_rank_max": u.max() - 1,
        "dead_experts": sum(1 for c in counts if c == 0),
        "dead_expected": experts * math.prod([1 - k / experts] * tokens),
        "dropped_assignments": None,
    }


def router_columns(v, valid):
    """Columns of a visit with at least one valid token and finite values; None where there is no value."""
    logits, probs, weights = (flat(f64(x)) for x in (v.router_logits, v.router_probs, v.topk_weights))
    idx = flat(v.topk_idx.numpy())
    keep = np.ones(len(idx), bool) if valid is None else valid.numpy().reshape(-1)
    scores = logits if v.selection_scores is None else flat(f64(v.selection_scores))
    tokens = [t for t in range(len(idx)) if keep[t]]
    experts, k = logits.shape[1], idx.shape[1]
    counts, mass = np.zeros(experts), np.zeros(experts)
    for t in tokens:
        for slot in range(k):
            counts[idx[t, slot]] += 1
            mass[idx[t, slot]] += weights[t, slot]
    row = load_columns(counts, len(tokens), experts, k)
    row["expert_mass"] = mass.tolist()
    row["maxvio_mass"] = experts * mass.max() / mass.sum() - 1 if mass.sum() else None
    balanced = row["maxvio_count"] < 1e-6
    row["mass_to_count_ratio"] = (
        None if balanced or not mass.sum() else row["maxvio_mass"] / row["maxvio_count"]
    )

    mean_prob = np.mean([probs[t] for t in tokens], axis=0)
    row["mean_prob"] = mean_prob.tolist()
    row["lb_loss"] = experts * float(np.dot(counts / (k * len(tokens)), mean_prob))
    row["lb_loss_micro_mean"] = row["lb_loss"]
    row["filled_microbatches"] = 1
    h = np.mean([special.entr(probs[t]).sum() for t in tokens])
    row["token_entropy_mean"] = h
    row["token_entropy_ratio"] = h / math.log(experts) if experts > 1 else None
    row["mutual_information"] = special.entr(mean_prob).sum() - h
    row["top1_prob_mean"] = np.mean([max(probs[t]) for t in tokens])
    row["topk_mass_mean"] = np.mean([sum(probs[t, e] for e in idx[t]) for t in tokens])

    squares = {t: float((weights[t] ** 2).sum()) for t in tokens}
    used = [weights[t].sum() ** 2 / squares[t] for t in tokens if squares[t] >= 1e-12]
    row["effective_topk_mean"] = np.mean(used) if used and k > 1 else None
    row["effective_topk_excluded"] = None if k == 1 else len(tokens) - len(used)

    ordered = [sorted(scores[t], reverse=True) for t in tokens]
    margins = np.array([r[0] - r[k - 1] for r in ordered])
    gaps = np.array([r[k - 1] - r[k] for r in ordered]) if k < experts else None
    for name, diffs in (("margin", None if k == 1 else margins), ("selection_gap", gaps)):
        row[f"{name}_mean"] = None if diffs is None else diffs.mean()
        row[f"{name}_min"] = None if diffs is None else diffs.min()
        row[f"{name}_hist"] = diffs  # compared with tolerance at the edges
    row["margin_p25"] = row["margin_p50"] = row["margin_p75"] = None if k == 1 else margins
    row["selection_gap_p01"] = gaps

    softmax = v.score_func == "softmax"
    z = np.array([special.logsumexp(logits[t]) for t in tokens])
    z_columns = {
        "z_mean": z.mean(),
        "z_std": z.std(),
        "z_min": z.min(),
        "z_max": z.max(),
        "z_sq_mean": (z**2).mean(),
        "z_frac_negative": (z < 0).mean(),
    }
    row |= z_columns if softmax else dict.fromkeys(z_columns)
    row["logit_rms"] = math.sqrt(np.mean([logits[t] ** 2 for t in tokens]))
    row["logit_abs_max"] = max(np.abs(logits[t]).max() for t in tokens)
    row["nonfinite_count"] = 0
    row["expert_bias"] = row["bias_jaccard"] = None
    if v.expert_bias is not None:
        row["expert_bias"] = f64(v.expert_bias).tolist()
        biased = v.selection_scores is not None
        unbiased = flat(f64(v.selection_scores) - f64(v.expert_bias) if biased else f64(v.router_logits))
        # Equal scores may be chosen either way, and the router's own top-k chose among them: bounds, not a value.
        overlaps = [shared_choices(unbiased[t], idx[t], k) for t in tokens]
        row["bias_jaccard"] = Between(
            *(np.mean([n / (2 * k - n) for n in side]) for side in zip(*overlaps, strict=True))
        )
    return row


class Between(NamedTuple):
    """A value that ties leave open."""

    least: float
    most: float


def shared_choices(scores, used, k):
    """Least and most experts that `used` can share with a top-k of `scores`, whose ties are open."""
    bar = np.sort(scores)[-k]
    near = 1e-6 * max(1.0, np.abs(scores).max())
    used = set(used.tolist())
    sure = {e for e, s in enumerate(scores) if s > bar + near}
    open_ = {e for e, s in enumerate(scores) if abs(s - bar) <= near}
    seats, wanted = k - len(sure), len(open_ & used)
    certain = len(sure & used)
    return certain + max(0, seats - (len(open_) - wanted)), certain + min(seats, wanted)


def residual_columns(residual, valid):
    h = f64(residual)
    keep = np.ones(h.shape[:2], bool) if valid is None else valid.numpy()
    rows = h[keep]
    norms = np.linalg.norm(rows, axis=1)
    cosines, excluded = [], 0
    for s in range(len(h)):
        seq = [x for x in h[s][keep[s]] if np.linalg.norm(x) >= 1e-12]
        excluded += int(keep[s].sum()) - len(seq)
        for i, a in enumerate(seq):
            for j, b in enumerate(seq):
                if i != j:
                    cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    return {
        "norm_mean": norms.mean(),
        "rms": math.sqrt((rows**2).mean()),
        "abs_max": np.abs(rows).max(),
        "nonfinite_count": 0,
        "token_correlation": np.mean(cosines) if cosines else None,
        "token_correlation_excluded": excluded,
        "token_correlation_pairs": len(cosines),
    }


def _mean_ratio(pairs):
    good = [n / d for n, d in pairs if d >= 1e-12]
    return (np.mean(good) if good else None), len(pairs) - len(good)


def transition_columns(t, valid, *, kind, same_layer, experts=0):
    """Columns of a transition with at least one valid token."""
    a, b = flat(f64(t.from_residual)), flat(f64(t.to_residual))
    keep = np.ones(len(a), bool) if valid is None else valid.numpy().reshape(-1)
    a, b = a[keep], b[keep]
    norm = np.linalg.norm
    row = {"delta_norm_mean": np.mean([norm(y - x) for x, y in zip(a, b, strict=True)]), "nonfinite_count": 0}
    both = list(zip(a, b, strict=True))
    for name, pairs in (
        ("relative_delta", [(norm(y - x), norm(x)) for x, y in both]),
        ("growth", [(norm(y), norm(x)) for x, y in both]),
        ("state_cosine", [(x @ y, norm(x) * norm(y)) for x, y in both]),
    ):
        row[name], row[f"{name}_excluded"] = _mean_ratio(pairs)
    row["input_distance"] = row["delta_norm_mean"] if kind == "from_input" else None
    row |= dict.fromkeys(("update_cosine", "update_cosine_excluded", "acceleration", "contraction"))
    if kind == "step_boundary" and t.before_residual is not None:
        before = flat(f64(t.before_residual))[keep]
        new, old = b - a, a - before
        row["update_cosine"], row["update_cosine_excluded"] = _mean_ratio(
            [(x @ y, norm(x) * norm(y)) for x, y in zip(new, old, strict=True)]
        )
        row["acceleration"] = np.mean([norm(x - y) for x, y in zip(new, old, strict=True)])
        total = sum(norm(y) for y in old)
        row["contraction"] = sum(norm(x) for x in new) / total if total >= 1e-12 else None
    names = ("topk_overlap", "topk_jaccard", "load_overlap", "overlap_chance", "jaccard_chance")
    row |= dict.fromkeys(names)
    if same_layer:
        i, j = (flat(x.numpy())[keep] for x in (t.from_topk_idx, t.to_topk_idx))
        k = i.shape[1]
        sets = [(set(x.tolist()), set(y.tolist())) for x, y in zip(i, j, strict=True)]
        row["topk_overlap"] = np.mean([len(x & y) / k for x, y in sets])
        row["topk_jaccard"] = np.mean([len(x & y) / len(x | y) for x, y in sets])
        loads = [np.array([(x == e).sum() for e in range(experts)]) / x.size for x in (i, j)]
        row["load_overlap"] = np.minimum(*loads).sum()
        row["overlap_chance"] = k / experts
        law = stats.hypergeom(experts, k, k)
        row["jaccard_chance"] = sum(law.pmf(m) * m / (2 * k - m) for m in range(k + 1))
    return row


def check_histogram(got, diffs):
    """Each cumulative count is right, up to values within 1e-5 (relative) of the edge."""
    got = np.asarray(got)
    assert got.sum() == len(diffs)
    cumulative = np.cumsum(got)[:-1]
    for count, edge in zip(cumulative, EDGES[1:-1], strict=True):
        assert (diffs < edge * (1 - 1e-5)).sum() <= count <= (diffs < edge * (1 + 1e-5)).sum()


def check_quantile(got, diffs, q):
    """Within one bin of the exact quantile."""
    exact = np.quantile(diffs, q, method="inverted_cdf")
    bins = [int(np.searchsorted(EDGES, x, side="right")) for x in (got, exact)]
    assert abs(bins[0] - bins[1]) <= 1, (got, exact)

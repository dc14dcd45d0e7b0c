"""Generated rows of every table of a probe: what a run with deep probes has beside its training rows."""

from __future__ import annotations

from typing import Any

import numpy as np

CORPUS = {"corpus_name": "core", "corpus_hash": "a" * 64}
Visits = list[tuple[str, int | None, int | None]]


def probe_tables(shape: Any, visits: Visits, generator: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Table → columns; `visits` are (block, loop step, layer) in the order of execution."""
    steps = np.arange(0, shape.steps + 1, max(1, shape.steps // 4))
    return {
        "probe_loss": _loss(steps),
        "probe_router": _router(shape, steps, visits, generator),
        "probe_overlap": _overlap(shape, steps),
        "probe_readout": _readout(shape, steps),
        "probe_margin": _margin(steps, visits, generator),
        "probe_perturbation": _perturbation(steps, visits),
        "probe_specialisation": _specialisation(steps, visits, generator),
        "probe_saturation": _saturation(steps, visits, generator),
    }


def keys(steps: np.ndarray, visits: Visits, *, each: int = 1) -> dict[str, Any]:
    """Columns of `each` rows per visit and step."""
    count = len(steps)
    return {
        "step": np.repeat(steps, len(visits) * each),
        "block": [b for b, *_ in visits for _ in range(each)] * count,
        "unrolled_pos": np.tile(np.repeat(np.arange(len(visits)), each), count),
        "loop_step": [r for _, r, _ in visits for _ in range(each)] * count,
        "layer_idx": [layer for *_, layer in visits for _ in range(each)] * count,
    }


def _loss(steps: np.ndarray) -> dict[str, Any]:
    strata = [
        ("all", "all"), *(("repetition", s) for s in ("low", "mid", "high")),
        *(("in_context_token", s) for s in ("0", "1", "2-3", "4+")), ("in_context_bigram", "0"),
    ]  # fmt: skip
    return CORPUS | {
        "step": np.repeat(steps, len(strata)), "stratum_kind": [k for k, _ in strata] * len(steps),
        "stratum": [s for _, s in strata] * len(steps), "loss_mean": np.linspace(7, 4, len(strata) * len(steps)),
    }  # fmt: skip


def _router(shape: Any, steps: np.ndarray, visits: Visits, generator: np.random.Generator) -> dict[str, Any]:
    rows = len(steps) * len(visits)
    return CORPUS | keys(steps, visits) | {
        "num_experts": shape.experts, "top_k": shape.top_k, "num_tokens": shape.tokens,
        "load_entropy_ratio": 0.95 + 0.05 * generator.random(rows), "margin_p50": generator.random(rows),
    }  # fmt: skip


def _overlap(shape: Any, steps: np.ndarray) -> dict[str, Any]:
    pairs = [
        (layer, a, b) for layer in range(shape.layers) for a in range(shape.loops) for b in range(a + 1, shape.loops)
    ]  # fmt: skip
    count = len(steps)
    return CORPUS | {
        "step": np.repeat(steps, len(pairs)), "layer_idx": [p[0] for p in pairs] * count,
        "from_loop_step": [p[1] for p in pairs] * count, "to_loop_step": [p[2] for p in pairs] * count,
        "topk_overlap": 0.6, "overlap_chance": shape.top_k / shape.experts,
    }  # fmt: skip


def _readout(shape: Any, steps: np.ndarray) -> dict[str, Any]:
    loop = np.tile(np.arange(shape.loops), len(steps))
    return CORPUS | {
        "step": np.repeat(steps, shape.loops), "loop_step": loop, "readout": "tail", "loss_mean": 6.0 - 0.1 * loop,
        "kl_from_previous": 0.1 / (1 + loop), "entropy_mean": 3.0 - 0.1 * loop, "argmax_settled": 0.5 + 0.01 * loop,
    }  # fmt: skip


def _margin(steps: np.ndarray, visits: Visits, generator: np.random.Generator) -> dict[str, Any]:
    rho = 1 + 0.2 * generator.random(2 * len(visits) * len(steps))
    return CORPUS | keys(steps, visits, each=2) | {
        "quantity": ["margin", "selection_gap"] * (len(rho) // 2), "shuffle_scope": "batch", "calibrated": True,
        "rho_cal": rho, "rho_cal_low": rho - 0.02, "rho_cal_high": rho + 0.02, "cell": "block",
    }  # fmt: skip


def _perturbation(steps: np.ndarray, visits: Visits) -> dict[str, Any]:
    loop = [visit for visit in visits if visit[0] == "loop"]
    found = keys(steps, loop)
    passes = np.array([r or 0 for r in found["loop_step"]])
    return CORPUS | found | {
        "amplification": 0.8**passes, "flipped_share": 0.01 * (passes + 1), "distance_rate": 0.8, "relative_rate": 0.7,
    }  # fmt: skip


def _specialisation(steps: np.ndarray, visits: Visits, generator: np.random.Generator) -> dict[str, Any]:
    kinds = [("domain", "code"), ("domain", "prose"), ("vocabulary", "all"), ("coactivation", "all")]
    rows = len(kinds) * len(visits) * len(steps)
    return CORPUS | keys(steps, visits, each=len(kinds)) | {
        "kind": [k for k, _ in kinds] * (rows // len(kinds)), "stratum": [s for _, s in kinds] * (rows // len(kinds)),
        "value": 0.25 + 0.25 * generator.random(rows), "chance": 0.25,
    }  # fmt: skip


def _saturation(steps: np.ndarray, visits: Visits, generator: np.random.Generator) -> dict[str, Any]:
    later = steps[1:]
    return CORPUS | keys(later, visits) | {
        "from_step": np.repeat(steps[:-1], len(visits)), "overlap_chance": 0.25,
        "saturation": 0.5 + 0.5 * generator.random(len(later) * len(visits)),
    }  # fmt: skip

"""The columns of the probe tables that are metrics, beside those that `probe_router` shares with `router`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loopscope.metrics.metric import Kind, Metric, Table

_FROM_SUMS = "Σ and tokens"
_NONE = "not; one number over one corpus"
_NO_TOKEN = "no token in the stratum: not_applicable; not finite: nonfinite"
_FAILED = "a visit of the pair failed: failed"
_FIRST = "first loop step: not_applicable; not finite: nonfinite"
_MARGIN = "margin at k = 1, gap at k = E: not_applicable; not finite: nonfinite"
_INTERVAL = "fewer than 5 documents: absent; else as rho_cal"
_RATE = "fewer than two passes, or a distance of 0: not_applicable; not finite: nonfinite"
_OVERLAP = "definition; chance for two independent uniform k-subsets of E"
_MARGIN_SOURCE = "definition: permutation null, calibrated by a bootstrap surrogate"
_LENS = "the logit lens (nostalgebraist 2020) through the model's own tail"
_OLMOE = "Muennighoff et al. 2024, arXiv 2409.02060, section 5"
_GROWTH = "finite-size Lyapunov exponent: growth of a small disturbance per pass"


def _metric(
    table: Table,
    name: str,
    formula: str,
    *,
    unit: str = "1",
    needs: tuple[str, ...],
    merge: str = _NONE,
    source: str,
    null_rule: str,
    kind: Kind = "float64",
) -> Metric:
    return Metric(
        name=name,
        table=table,
        kind=kind,
        formula=formula,
        unit=unit,
        needs=needs,
        merge=merge,
        source=source,
        null_rule=null_rule,
    )


def _loss(name: str, formula: str, unit: str) -> Metric:
    source = "definition; strata of documents from the corpus's manifest, of tokens by earlier occurrences"
    return _metric(
        "probe_loss",
        name,
        formula,
        unit=unit,
        needs=("per_token_loss",),
        merge=_FROM_SUMS,
        source=source,
        null_rule=_NO_TOKEN,
    )


def _overlap(name: str, formula: str) -> Metric:
    return _metric(
        "probe_overlap",
        name,
        formula,
        needs=("topk_idx",),
        merge=_FROM_SUMS,
        source=_OVERLAP,
        null_rule=_FAILED,
    )


def _readout(name: str, formula: str, unit: str, null_rule: str = "not finite: nonfinite") -> Metric:
    return _metric(
        "probe_readout",
        name,
        formula,
        unit=unit,
        needs=("residual",),
        merge=_FROM_SUMS,
        source=_LENS,
        null_rule=null_rule,
    )


def _margin(
    name: str, formula: str, unit: str = "1", kind: Kind = "float64", null_rule: str = _MARGIN
) -> Metric:
    return _metric(
        "probe_margin",
        name,
        formula,
        unit=unit,
        needs=("choice_scores",),
        source=_MARGIN_SOURCE,
        null_rule=null_rule,
        kind=kind,
    )


def _perturbation(name: str, formula: str, null_rule: str = "not finite: nonfinite") -> Metric:
    return _metric(
        "probe_perturbation", name, formula, needs=("residual",), source=_GROWTH, null_rule=null_rule
    )


def _special(name: str, formula: str, null_rule: str, kind: Kind = "float64") -> Metric:
    return _metric(
        "probe_specialisation",
        name,
        formula,
        needs=("topk_idx",),
        source=_OLMOE,
        null_rule=null_rule,
        kind=kind,
    )


METRICS = (
    _loss("loss_mean", "loss_sum/num_target_tokens, one flat mean per stratum", "nats"),
    _loss("loss_sum", "Σ cross-entropy over the stratum's target tokens", "nats"),
    _overlap("topk_overlap", "mean_t |S_a ∩ S_b| / k, every pair of loop steps of a layer"),
    _overlap("topk_jaccard", "mean_t |S_a ∩ S_b| / |S_a ∪ S_b|"),
    _overlap("load_overlap", "Σ_e min(f_a,e, f_b,e)"),
    _overlap("overlap_chance", "k/E"),
    _overlap("jaccard_chance", "Σ_m Hypergeom(m; E, k, k)·m/(2k − m)"),
    _readout("loss_mean", "cross-entropy of q_r, r → tail → norm → head", "nats"),
    _readout("loss_sum", "Σ cross-entropy of q_r", "nats"),
    _readout("kl_from_previous", "mean_t KL(q_{r−1} ‖ q_r)", "nats", _FIRST),
    _readout("entropy_mean", "mean_t H(q_r)", "nats"),
    _readout("entropy_change", "mean_t H(q_r) − mean_t H(q_{r−1})", "nats", _FIRST),
    _readout(
        "argmax_settled",
        "share of tokens whose arg-max equals that of every later step",
        "1",
        "last loop step: not_applicable",
    ),
    _margin("observed_mean", "mean_t of r_(1) − r_(k), or of r_(k) − r_(k+1)", "score"),
    _margin("null_median", "median over column shuffles of centred scores of that mean", "score"),
    _margin("rho", "observed_mean / null_median"),
    _margin("rho_ref", "rho of columns resampled with replacement and centred again"),
    _margin("rho_cal", "rho / rho_ref"),
    _margin("rho_cal_low", "2.5% quantile of rho_cal, documents resampled", null_rule=_INTERVAL),
    _margin("rho_cal_high", "97.5% quantile of rho_cal, documents resampled", null_rule=_INTERVAL),
    _margin(
        "cell",
        "which of the two rho_cal_low exceed 1.03: neither, gap, margin, both",
        kind="string",
        null_rule="one of the two does not exist: not_applicable; else as rho_cal_low",
    ),
    _perturbation("relative_distance", "‖h′ − h‖_F / ‖h‖_F, mean over directions"),
    _perturbation("relative_distance_min", "smallest direction's"),
    _perturbation("relative_distance_max", "largest direction's"),
    _perturbation("amplification", "‖h′ − h‖_F / ‖injected‖_F, mean over directions"),
    _perturbation(
        "flipped_share",
        "share of tokens whose expert set changed",
        "dense layer: not_applicable; not finite: nonfinite",
    ),
    _perturbation("distance_rate", "(‖h′_r − h_r‖_F / ‖h′_0 − h_0‖_F)^(1/r) at one layer", _RATE),
    _perturbation("relative_rate", "the same of relative_distance", _RATE),
    _special(
        "value",
        "domain: max_e N_{e,D}/N_D; vocabulary: mean_x max_e N_{e,x}/N_x; coactivation: mean N_ij/N_i",
        "no token occurs 100 times: absent; E = 1: not_applicable",
    ),
    _special("chance", "k/E; permuted tokens; (k − 1)/(E − 1)", "as value"),
    _special("largest", "max over pairs of N_ij/N_i", "other kinds: null"),
    _special("expert_share", "N_{e,D}/N_D per expert", "other kinds: null", "list<float64>"),
    _special("pair_count", "N_ij for i < j", "other kinds, E > 64: null", "list<int64>"),
    _metric(
        "probe_saturation",
        "saturation",
        "mean_t |S ∩ S′|/k, S′ the choice at an earlier probe",
        needs=("topk_idx",),
        source=_OLMOE,
        null_rule="never; no row without an earlier deep probe of the same tokens",
    ),
    _metric(
        "probe_saturation",
        "overlap_chance",
        "k/E",
        needs=("topk_idx",),
        source=_OVERLAP,
        null_rule="never",
    ),
)

PROBE_REGISTRY: Mapping[tuple[str, str], Metric] = MappingProxyType(
    {(metric.table, metric.name): metric for metric in METRICS}
)
"""(table, column) → metric, of the probe tables; kept apart from `REGISTRY`, which training rows are made of."""

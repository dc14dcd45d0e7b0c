"""The documentation page of the metrics, generated from the registry.

``python -m loopscope.metrics.docs > docs/metrics.md``
"""

from __future__ import annotations

from loopscope.metrics.histogram import EDGES, NUM_BINS
from loopscope.metrics.metric import Metric
from loopscope.metrics.probe.registry import PROBE_REGISTRY
from loopscope.metrics.registry import REGISTRY

EVERY = {**REGISTRY, **PROBE_REGISTRY}
"""(table, column) → metric, training rows first."""

_INTRODUCTION = f"""\
# Metrics

Generated from the metric registry by `python -m loopscope.metrics.docs > docs/metrics.md`; do not edit by hand.
`loopscope metrics` prints the same list.

Visit: one execution of one layer. Valid tokens t = 1..T; z_t = logsumexp of the router logits; p_t = softmax of the
logits over all E experts (sigmoid router: s/Σs); S_t = the k experts used; w_te = combine weights, sum 1 over S_t;
c_e = #{{t : e in S_t}}; f_e = c_e/(kT); P_e = mean_t p_te; m_e = Σ_t w_te; u_e = E·f_e; h = block output; ĥ = h/‖h‖.
Choice scores r = `selection_scores` where the model gives them, else the raw logits; `score_space` says which.

- Only valid tokens count. Different physical layers are never pooled before a statistic.
- Entropies are in nats, 0·ln 0 = 0, standard deviations have ddof 0.
- A ratio per token is averaged over tokens; tokens whose denominator is below 1e-12 are excluded, and counted in
  the `_excluded` column.
- A null has its reason in `null_reasons`: `not_applicable` (does not exist for this shape or kind of row),
  `absent:<why>` (what it needs was not there), `failed`, `nonfinite` (an input that it needs is not finite).
- Histograms (`_hist`) count tokens in {NUM_BINS} bins that never change: [0, 2^-16), half octaves up to 2^15, and
  [2^15, inf), that is [0, {EDGES[1]:.3g}), [{EDGES[1]:.3g}, {EDGES[2]:.3g}), ..., [{EDGES[-2]:.0f}, inf). Quantiles
  come from them, linear within a bin, so their error is at most one bin.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(metric: Metric) -> str:
    cells = (
        f"`{metric.name}`",
        metric.kind,
        metric.formula,
        metric.unit,
        ", ".join(metric.needs) or "–",
        metric.merge,
        metric.null_rule,
        metric.source,
    )
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def render() -> str:
    """The whole page, Markdown."""
    parts = [_INTRODUCTION]
    for table in dict.fromkeys(table for table, _ in EVERY):
        parts.append(f"\n## `{table}`\n")
        parts.append("| column | type | formula | unit | needs | merges by | null when | source |")
        parts.append("|---|---|---|---|---|---|---|---|")
        parts.extend(_row(metric) for (owner, _), metric in EVERY.items() if owner == table)
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(render(), end="")

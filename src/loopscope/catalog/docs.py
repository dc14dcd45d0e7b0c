"""What the documentation says of columns, gauges and rules: `docs/metrics.md`, and tables in other pages."""

from loopscope.catalog.bins import EDGES, NUM_BINS
from loopscope.catalog.registry import GAUGES, METRICS
from loopscope.catalog.rule_registry import RULES
from loopscope.catalog.table import Column

_INTRODUCTION = f"""\
# Metrics

Generated from the catalogue by `loopscope generate`; do not edit by hand. `loopscope metrics` prints the same list.

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
- "Merges by" says how rows of several ranks or windows give the value of all together: `sum` (of lists, entry by
  entry), `max`, `min`, `constant`, `last`, `mean by <weight>`, or from which columns it is computed anew.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(column: Column) -> str:
    cells = (
        f"`{column.name}`",
        column.type,
        column.formula,
        column.unit,
        ", ".join(column.needs) or "–",
        column.merge,
        column.null_rule,
        column.source,
    )
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def metrics_page() -> str:
    """The whole page, Markdown."""
    parts = [_INTRODUCTION]
    for table in dict.fromkeys(table for table, _ in METRICS):
        parts += [
            f"\n## `{table}`\n",
            "| column | type | formula | unit | needs | merges by | null when | source |",
            "|---|---|---|---|---|---|---|---|",
            *(_row(column) for (owner, _), column in METRICS.items() if owner == table),
        ]
    return "\n".join(parts) + "\n"


def tracker_keys() -> str:
    """The table of the gauges by their keys in trackers, Markdown."""
    lines = ["| key | from the rows of its step |", "|---|---|"]
    return "\n".join(lines + [f"| `{gauge.key}` | {_cell(gauge.words)} |" for gauge in GAUGES.values()])


def rules_table() -> str:
    """The table of the alert rules at their default bounds, Markdown."""
    lines = ["| rule | bound | why |", "|---|---|---|"]
    for rule in RULES.values():
        bound = f"{rule.bound}; at once" if rule.at_once else rule.bound
        lines.append(f"| `{rule.name}` | {_cell(bound)} | {_cell(rule.why)} |")
    return "\n".join(lines)

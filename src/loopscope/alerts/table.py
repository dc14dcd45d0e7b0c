"""The rules as people read them: what each says, and why its bound is where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from loopscope.alerts.settings import AlertSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule in words."""

    name: str
    title: str
    """What an alert of this rule means, as a headline."""
    bound: str
    """The bound, in the notation of the metrics' documentation, with the numbers of the settings in force."""
    why: str
    """Why the bound is where it is."""
    chart: str
    """Identifier of the chart that shows it."""
    at_once: bool = False
    """True where one row is enough: no warm-up, no window, no end."""
    own_window: bool = False
    """True where the rule itself looks back over the window, so that one reading is enough."""


_RULES = (
    Rule(
        name="closure",
        title="The total loss is not the sum of its parts",
        bound="|closure_error| > {closure:.3g} · max(1, |total_loss|)",
        why="float32 noise with margin; an auxiliary loss counted twice, or never, breaks it; there is no warm-up",
        chart="closure",
    ),
    Rule(
        name="nonfinite",
        title="Values are not finite",
        bound="any NaN or infinity in losses, router tensors or residuals",
        why="never normal",
        chart="health",
        at_once=True,
    ),
    Rule(
        name="coverage",
        title="Visits were not seen as promised",
        bound="any expected visit missing, or any unexpected one",
        why="never normal: a hook is silent, or the model is not the one that its configuration promises",
        chart="coverage",
        at_once=True,
    ),
    Rule(
        name="dropped",
        title="Measurements were lost",
        bound="any row or measurement dropped",
        why="never normal: the disk is full, or loopscope itself failed",
        chart="health",
        at_once=True,
    ),
    Rule(
        name="bad_input",
        title="Router tensors break their contract",
        bound="any weight, index or probability out of its range",
        why="never normal: the model hands over something else than it says",
        chart="health",
        at_once=True,
    ),
    Rule(
        name="dead_expert",
        title="Experts get no tokens",
        bound="the same expert at 0 over {sustain} traces, where it should have had >= {dead_expected:g} assignments",
        why="a balanced router leaves an expert empty this long with chance e^-{dead_expected:g}",
        chart="dead",
        own_window=True,
    ),
    Rule(
        name="loop_growth",
        title="The hidden state keeps growing from loop step to loop step",
        bound="growth at the last step_boundary > {growth:g}, and not falling over the last 3 loop steps",
        why="equal orthogonal updates alone give 1.41, 1.22, 1.15: growth that falls is normal",
        chart="growth",
    ),
    Rule(
        name="loop_delta",
        title="The loop moves further than it once did",
        bound="relative_delta at the last step_boundary > {relative_delta:g} × its best mean over {sustain} traces",
        why="a loop that converged and does so no more; relative to itself, so that depth does not matter",
        chart="relative_delta",
    ),
    Rule(
        name="router_collapse",
        title="The router collapsed: it is sure, and makes the same choice for every token",
        bound="token_entropy_ratio < {collapse:g} and mutual_information < {collapse:g} · ln E",
        why="either alone is normal in a specialised router",
        chart="token_entropy",
    ),
    Rule(
        name="load_entropy",
        title="A few experts carry the load",
        bound="load_entropy_ratio < {load_entropy:g} (critical: {load_entropy_critical:g})",
        why="token entropy alone falls when experts specialise, so there is no rule on it",
        chart="load_entropy",
    ),
    Rule(
        name="maxvio",
        title="The busiest expert carries far more than its share",
        bound="maxvio_count > max({maxvio_share:g}·(E/k − 1), {maxvio_noise:g}·sqrt(2 ln E · E/(kT))) "
        "(critical: {maxvio_critical:g}·(E/k − 1))",
        why="its maximum is E/k − 1, so that no absolute bound works; the second term is sampling noise",
        chart="maxvio",
    ),
    Rule(
        name="z",
        title="Router logits drift away from zero",
        bound="|z_mean| > ln E + {z_above:g}, or logit_abs_max > {logit_abs_max:g}",
        why="bfloat16 steps by 0.25 at 50; z < 0 for half the tokens is normal",
        chart="z",
    ),
    Rule(
        name="token_correlation",
        title="Tokens become alike",
        bound="token_correlation > {token_correlation:g} at the last loop visit",
        why="rank collapse: every position holds nearly the same vector",
        chart="token_correlation",
    ),
    Rule(
        name="files",
        title="Files of the run cannot be read as they should",
        bound="every part and journal is there, whole, and of a known schema",
        why="what cannot be believed is left out of every number here, never guessed",
        chart="files",
        at_once=True,
    ),
    Rule(
        name="other",
        title="Something else was noticed",
        bound="any health event that is not information",
        why="it was written because somebody should look",
        chart="health",
        at_once=True,
    ),
)


def rules_at(settings: AlertSettings) -> dict[str, Rule]:
    """Name → rule with the bounds in force, in the order in which alerts of one severity are listed."""
    numbers = asdict(settings)
    return {
        rule.name: replace(rule, bound=rule.bound.format(**numbers), why=rule.why.format(**numbers))
        for rule in _RULES
    }


RULES: Mapping[str, Rule] = MappingProxyType(rules_at(AlertSettings()))
"""The rules at their default bounds."""

EVENTS: Mapping[str, str] = MappingProxyType(
    {
        "coverage": "coverage",
        "probe_coverage": "coverage",
        "unexpected_visits": "coverage",
        "trace_incomplete": "coverage",
        "depth_differs": "coverage",
        "sink_fault": "coverage",
        "nonfinite": "nonfinite",
        "nonfinite_loss": "nonfinite",
        "dropped_rows": "dropped",
        "error": "dropped",
        "visit_failed": "dropped",
        "metric_failed": "dropped",
        "rank_failed": "dropped",
        "weights_not_normalised": "bad_input",
        "index_out_of_range": "bad_input",
        "probabilities_as_logits": "bad_input",
    }
)
"""Health event → rule; what is not here is `other`. `closure` has a rule of its own over the loss rows, and an
`alert` is what a rule said."""

"""Every alert rule. A new rule is one file in `rules/` and its name here."""

from collections.abc import Mapping
from types import MappingProxyType

from loopscope.catalog.rule import Judge, Rule, RuleBounds
from loopscope.catalog.rules import (
    bad_input,
    closure,
    coverage,
    dead_expert,
    dropped,
    files,
    load_entropy,
    loop_delta,
    loop_growth,
    maxvio,
    nonfinite,
    other,
    router_collapse,
    token_correlation,
    z,
)

_RULES = tuple(
    module.RULE
    for module in (
        closure,
        nonfinite,
        coverage,
        dropped,
        bad_input,
        dead_expert,
        loop_growth,
        loop_delta,
        router_collapse,
        load_entropy,
        maxvio,
        z,
        token_correlation,
        files,
        other,
    )
)


def rules_at(bounds: RuleBounds) -> dict[str, Rule]:
    """Name → rule with the bounds in force, in the order in which alerts of one severity are listed.

    What is never normal first, then what is rare and particular, then uneven load, which often follows from another
    sickness.
    """
    return {rule.name: rule.at(bounds) for rule in _RULES}


RULES: Mapping[str, Rule] = MappingProxyType(rules_at(RuleBounds()))
"""The rules at their default bounds."""

_TABLES = dict.fromkeys(judgement.table for rule in _RULES for judgement in rule.judgements)

JUDGES: Mapping[str, tuple[tuple[Rule, Judge], ...]] = MappingProxyType(
    {
        table: tuple((rule, each.judge) for rule in _RULES for each in rule.judgements if each.table == table)
        for table in _TABLES
    }
)
"""Table → the rules over its rows, and how they judge them."""

RULE_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        table: tuple(
            dict.fromkeys(
                name
                for rule in _RULES
                for judgement in rule.judgements
                if judgement.table == table
                for name in judgement.columns
            )
        )
        for table in _TABLES
    }
)
"""Table → what the rules read of it, besides `step`."""

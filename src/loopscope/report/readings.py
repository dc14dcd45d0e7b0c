"""How a check of the first screen is read off the rows: means over the window, judged by the rules' own functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loopscope.alerts import RULES, AlertSettings
from loopscope.catalog.row_batch import RowBatch
from loopscope.catalog.rows import VISIT
from loopscope.catalog.rule_registry import RULE_COLUMNS
from loopscope.catalog.rules.loop_delta import BestMean
from loopscope.report.queries import RunQueries

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A value in words."""

    text: str
    excess: float = 0.0
    """In units of its bound."""
    judged: bool = True
    """False where there is a value, but no rule for it."""


def by_rule(name: str, queries: RunQueries, settings: AlertSettings) -> Seen | None:
    """The place that is furthest out by a rule over one table: over its last traces, or of all losses the worst."""
    table = RULES[name].judgements[0].table
    return furthest(name, _ROWS[table](queries, settings), settings) if queries.has(table) else None


def furthest(
    name: str, rows: Rows, settings: AlertSettings, memory: dict[Any, Any] | None = None
) -> Seen | None:
    """The row that is furthest out by a rule, which takes them for one step.

    Args:
        name: of the rule.
        rows: one per place.
        settings: bounds.
        memory: what the rule knows of the run before these rows.
    """
    rule = RULES[name]
    judgement = rule.judgements[0]
    batch = RowBatch(judgement.table, lambda column: [row[column] for row in rows])
    with np.errstate(all="ignore"):
        found = judgement.judge(batch, settings, memory or {})
    if found is None or np.isnan(found.value).all():
        return None
    if not np.isnan(found.excess).all():
        worst = int(np.nanargmax(found.excess))
        return Seen(text=found.now(worst), excess=float(found.excess[worst]))
    if rule.check is None or not rule.check.unjudged:
        return None
    return Seen(text=f"{found.now(int(np.nanargmax(found.value)))}; {rule.check.unjudged}", judged=False)


def closure(queries: RunQueries, settings: AlertSettings) -> Seen | None:
    """The step whose loss adds up worst."""
    seen = by_rule("closure", queries, settings)
    return seen and replace(seen, text=f"{seen.text} in {_many(_losses(queries, settings)[0]['n'], 'step')}")


def finite(queries: RunQueries, settings: AlertSettings) -> Seen | None:
    """Non-finite values of losses, router tensors and residuals."""
    steps, entries, known = 0, 0, False
    if queries.has("loss"):
        known = True
        steps = queries.rows(
            f"select count(nonfinite_fields) as n from loss where {queries.scope('loss').where}"
        )[0]["n"]
    for table in ("router", "residual"):
        if queries.has(table):
            known = True
            entries += queries.rows(
                f"select coalesce(sum(nonfinite_count), 0) as n from {table} where {queries.scope(table).where}"
            )[0]["n"]
    text = f"{_many(steps, 'step')} with a non-finite loss, {entries:,} non-finite entries in traces"
    return Seen(text=text, excess=2.0 if steps or entries else 0.0) if known else None


def dead(queries: RunQueries, settings: AlertSettings) -> Seen | None:
    """Experts that got nothing over the whole window, all visits together."""
    if not queries.has("router"):
        return None
    keys = ", ".join(f"any_value({name}) as {name}" for name in VISIT)
    rows = queries.rows(f"""
        select {keys}, 0 as step, 1 as top_k, 1 as num_tokens, count(*) as num_experts,
            count(*) filter (c = 0) as dead_experts, list(c order by expert) as expert_count
        from (select b, r, l, expert, {keys}, sum(c)::bigint as c from (
                select *, unnest(expert_count) as c, unnest(range(len(expert_count))) as expert
                from {queries.visits("router")} where step in ({_recent(queries, "router", settings)}))
            group by b, r, l, expert)
        group by b, r, l""")
    # The rows are sums over the window already: whatever is empty in them was so throughout.
    seen = furthest("dead_expert", rows, replace(settings, sustain=1, dead_expected=1e-9))
    empty, experts = (sum(row[name] for row in rows) for name in ("dead_experts", "num_experts"))
    return seen and replace(seen, text=f"{empty} of the {experts:,} experts of all visits got no token")


def movement(queries: RunQueries, settings: AlertSettings) -> Seen | None:
    """The layer whose last pass moves the state furthest, in units of its best mean."""
    if not queries.has("transition"):
        return None
    return furthest("loop_delta", _boundaries(queries, settings), settings, _best_means(queries, settings))


def measured(queries: RunQueries, settings: AlertSettings) -> Seen | None:
    """Coverage of the traces, and everything that was written because somebody should look."""
    if not queries.has("health"):
        return None
    row = queries.rows(
        "select count(*) filter (event = 'coverage') as traces, min(value) filter (event = 'coverage') as least, "
        "count(*) filter (severity <> 'info' and event not in ('closure', 'alert')) as events from health"
    )[0]
    if not row["traces"]:
        return None
    seen = (
        "every visit"
        if row["least"] is None or row["least"] >= 1
        else f"at least {row['least']:.0%} of the visits"
    )
    text = f"{seen} seen in {_many(row['traces'], 'trace')}; {_many(row['events'], 'event')} to queries at"
    return Seen(text=text, excess=2.0 if row["least"] is not None and row["least"] < 1 else 0.0)


def files(queries: RunQueries, settings: AlertSettings) -> Seen | None:
    """Problems of the run's files."""
    count = len(queries.run.problems)
    text = "every file was read, and its checksum is right" if not count else _many(count, "problem")
    return Seen(text=text, excess=2.0 if count else 0.0)


def _losses(queries: RunQueries, settings: AlertSettings) -> Rows:
    """The loss that adds up worst, and of how many."""
    return queries.once(
        "worst loss",
        lambda: queries.rows(
            f"select 0 as step, {', '.join(RULE_COLUMNS['loss'])}, count(*) over () as n from loss "
            f"where {queries.scope('loss').where} and closure_error is not null "
            "order by abs(closure_error) / greatest(1, abs(total_loss)) desc limit 1"
        ),
    )


def _visits(queries: RunQueries, settings: AlertSettings) -> Rows:
    """Means of each visit."""
    keys = ", ".join(f"any_value({name}) as {name}" for name in VISIT if name != "unrolled_pos")
    numbers = [name for name in RULE_COLUMNS["router"] if name not in (*VISIT, "expert_count")]
    means = ", ".join(f"avg({name}) as {name}" for name in numbers)
    return queries.once(
        "visits of the last traces",
        lambda: queries.rows(
            f"select 0 as step, {keys}, min(unrolled_pos) as unrolled_pos, {means} from {queries.visits('router')} "
            f"where step in ({_recent(queries, 'router', settings)}) group by b, r, l"
        ),
    )


def _last_states(queries: RunQueries, settings: AlertSettings) -> Rows:
    """The mean after the loop."""
    return queries.rows(
        "select 0 as step, 'loop' as block, unrolled_pos, avg(token_correlation) as token_correlation "
        f"from {queries.speaking('residual')} where block = 'loop' "
        f"and step in ({_recent(queries, 'residual', settings)}) group by unrolled_pos"
    )


def _boundaries(queries: RunQueries, settings: AlertSettings) -> Rows:
    """Means of each layer's step boundaries."""
    return queries.rows(
        "select 0 as step, kind, to_layer_idx, to_loop_step, avg(growth) as growth, "
        f"avg(relative_delta) as relative_delta from transition where {queries.scope('transition').where} "
        f"and kind = 'step_boundary' and step in ({_recent(queries, 'transition', settings)}) group by all"
    )


_ROWS: Mapping[str, Callable[[RunQueries, AlertSettings], Rows]] = {
    "loss": _losses,
    "router": _visits,
    "residual": _last_states,
    "transition": _boundaries,
}


def _best_means(queries: RunQueries, settings: AlertSettings) -> dict[tuple[int, int], BestMean]:
    """(layer, loop step) → the smallest mean of a whole window that the run has had."""
    rows = queries.rows(
        "select to_layer_idx, to_loop_step, min(mean) as best from (select to_layer_idx, to_loop_step, "
        "avg(relative_delta) over w as mean, count(relative_delta) over w as n from transition "
        f"where {queries.scope('transition').where} and kind = 'step_boundary' and step > {settings.warmup_steps} "
        "window w as (partition by to_layer_idx, to_loop_step order by step "
        f"rows between {settings.sustain - 1} preceding and current row)) where n = {settings.sustain} group by all"
    )
    return {(row["to_layer_idx"], row["to_loop_step"]): BestMean(row["best"]) for row in rows}


def _recent(queries: RunQueries, table: str, settings: AlertSettings) -> str:
    where = queries.scope(table).where
    return f"select distinct step from {table} where {where} order by step desc limit {settings.sustain}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"

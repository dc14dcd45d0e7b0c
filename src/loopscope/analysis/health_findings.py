"""What is healthy about a run and what is not, in words: the alert rules replayed over its rows."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from loopscope.alerts import RULES, Alert, AlertSettings, Bounds, settings_for
from loopscope.alerts.replay import replay_run
from loopscope.analysis.records import value
from loopscope.analysis.run import Run
from loopscope.catalog.registry import TABLES

Severity = Literal["critical", "warn", "early"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that people should know: all alerts of one rule together."""

    severity: Severity
    """"early": it breaks the bound now, but the run is too young to be judged by it."""
    rule: str
    title: str
    text: str
    """Where, since when, how far; one or two sentences."""
    chart: str
    """Identifier of the chart that shows it."""
    over: bool = False
    """True where every alert of it has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What the rules say of a run."""

    found: tuple[Finding, ...]
    """Alerts, worst first."""
    early: tuple[Finding, ...]
    """What would be an alert if the run were older."""
    judged: str
    """What was judged by which rows, in one sentence."""
    alerts: tuple[Alert, ...]
    settings: AlertSettings = field(default_factory=AlertSettings)
    """The bounds that it was judged by."""

    @property
    def state(self) -> Literal["critical", "warn", "ok", "young", "empty"]:
        """The worst that lasts; "young" where most rules cannot judge yet, "empty" without any row."""
        lasting = [f.severity for f in self.found if not f.over]
        if "critical" in lasting:
            return "critical"
        if lasting:
            return "warn"
        if not self.judged:
            return "empty"
        return "young" if self.young else "ok"

    @property
    def young(self) -> bool:
        """True where routing and loop cannot be judged yet."""
        return "warm-up" in self.judged


def replay(run: Run, bounds: Bounds = None) -> list[Alert]:
    """The alerts of a run's live rows: those that fired while it trained, had the rules been on.

    Args:
        run: the run.
        bounds: to judge by, instead of those that the run was trained with.
    """
    alerts = replay_run(run.reader, settings_for(run.manifest.configuration, bounds)).alerts
    order = list(RULES)
    return sorted(alerts, key=lambda a: (a.severity != "critical", order.index(a.rule), a.fired))


def findings(run: Run, bounds: Bounds = None) -> Findings:
    """The alerts in words, and what looks like becoming one; `bounds` as for `replay`."""
    settings = settings_for(run.manifest.configuration, bounds)
    damaged = tuple(_damaged(run))
    last = _last_step(run)
    if last is None:
        return Findings(found=damaged, early=(), judged="", alerts=(), settings=settings)
    alerts = replay(run, settings)
    told = tuple(_grouped(alerts, last))
    if all(finding.rule != "nonfinite" for finding in told):
        damaged = (*damaged, *_not_finite(run))
    # What lasts comes first.
    found = tuple(sorted((*damaged, *told), key=lambda finding: finding.over))
    early: tuple[Finding, ...] = ()
    judged = f"Judged over steps {settings.warmup_steps + 1} to {last}."
    traces = _traces_after(run, settings.warmup_steps)
    if traces < settings.sustain:
        sustain = max(3, min(settings.sustain, _traces_after(run, 0) // 4))
        young = replace(settings, warmup_steps=0, sustain=sustain)
        known = {alert.rule for alert in alerts}
        signs = [a for a in replay(run, young) if a.rule not in known and a.cleared is None]
        early = tuple(_grouped(signs, last, early=True))
        judged = (
            f"The run is at step {last}, with {traces} traces after its warm-up of {settings.warmup_steps} steps; "
            f"routing and loop are judged from {settings.sustain} traces on. Closure, coverage, non-finite values "
            "and lost rows are judged from step 1."
        )
    return Findings(found=found, early=early, judged=judged, alerts=tuple(alerts), settings=settings)


def _grouped(alerts: list[Alert], last: int, *, early: bool = False) -> Iterator[Finding]:
    groups: dict[str, list[Alert]] = {}
    for alert in alerts:
        groups.setdefault(alert.rule, []).append(alert)
    for name, group in groups.items():
        rule = RULES[name]
        severity: Severity = "critical" if any(a.severity == "critical" for a in group) else "warn"
        yield Finding(
            severity="early" if early else severity,
            rule=name,
            title=rule.title,
            text=_words(group, last, at_once=rule.at_once),
            chart=rule.chart,
            over=not rule.at_once and all(a.cleared is not None for a in group),
        )


def _damaged(run: Run) -> Iterator[Finding]:
    problems = run.problems
    if not problems:
        return
    lost = sum(p.lost_rows or 0 for p in problems)
    unknown = sum(1 for p in problems if p.lost_rows is None)
    cost = f"{lost} rows are known to be lost" + (
        f", and what {unknown} of them cost cannot be told" if unknown else ""
    )
    many = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    rule = RULES["files"]
    yield Finding(
        severity="critical" if lost or unknown else "warn",
        rule=rule.name,
        title=rule.title,
        text=f"{many}; {cost}. First: {problems[0].where}: {problems[0].text}.",
        chart=rule.chart,
    )


# Numbers that people see. One that is not finite says that the run is sick, whoever wrote it: the collector writes null
# and an event instead.
_FINITE = {
    table: tuple(
        name
        for name, column in TABLES[table].by_name.items()
        if column.type == "float64"
        and (column.shown or any(gauge.column == name for gauge in TABLES[table].gauges))
    )
    for table in ("loss", "router", "residual", "transition")
}


def _not_finite(run: Run) -> Iterator[Finding]:
    """NaN and infinity in the rows themselves."""
    found = []
    for table, names in _FINITE.items():
        if table in run.tables:
            counts = ", ".join(f"count(*) filter (not isfinite({name}))" for name in names)
            row = run.sql(f"select {counts} from {table}").fetchall()[0]
            found += [(f"{table}.{name}", count) for name, count in zip(names, row, strict=True) if count]
    for table in ("router", "residual"):
        if table in run.tables and (count := value(run, f"select sum(nonfinite_count) from {table}")):
            found.append((f"{table}.nonfinite_count", int(count)))
    if found:
        total, rule = sum(count for _, count in found), RULES["nonfinite"]
        where = ", ".join(name for name, _ in found[:4]) + (", ..." if len(found) > 4 else "")
        text = f"{total:,} {'value' if total == 1 else 'values'} of the rows, in {where}."
        yield Finding(severity="critical", rule=rule.name, title=rule.title, text=text, chart=rule.chart)


def _words(group: list[Alert], last: int, *, at_once: bool) -> str:
    if at_once:
        events = sum(a.count for a in group)
        first, final = min(a.since for a in group), max(a.last for a in group)
        when = f"at step {first}" if first == final else f"between steps {first} and {final}"
        return f"{events} {'event' if events == 1 else 'events'} {when}. First: {group[0].text}"
    worst = max(group, key=lambda a: (a.cleared is None, a.worst))
    subjects = list(dict.fromkeys(a.subject for a in group))
    lasting = sum(1 for subject in subjects if any(a.cleared is None for a in group if a.subject == subject))
    where = subjects[0] if len(subjects) == 1 else f"{len(subjects)} places ({_some(subjects)})"
    since = min(a.since for a in group)
    if lasting == 0:
        state = f"over since step {max(a.cleared or last for a in group)}"
    elif lasting == len(subjects):
        state = f"still so at step {last}"
    else:
        state = f"still so at {lasting} of them at step {last}"
    worst_at = "" if len(subjects) == 1 else f" Worst: {worst.subject}."
    return f"{where[0].upper()}{where[1:]}, since step {since}; {state}.{worst_at} {worst.text}."


def _some(subjects: list[str]) -> str:
    shown = "; ".join(subjects[:3])
    return shown if len(subjects) <= 3 else f"{shown}; ..."


def _last_step(run: Run) -> int | None:
    tables = [table for table in run.tables if table not in ("attempt", "health")]
    steps = [value(run, f"select max(step) from {table}") for table in tables]
    return max((step for step in steps if step is not None), default=None)


def _traces_after(run: Run, step: int) -> int:
    query = "select count(distinct step) from {} where step > {}"
    tables = [table for table in ("router", "residual") if table in run.tables]
    return max((value(run, query.format(table, step)) for table in tables), default=0)

"""`loopscope alerts [RUN]`: the alert rules with their bounds, or what they say of a run."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from loopscope.alerts import Alert, AlertOverrides, AlertSettings, Rule, rules_at
from loopscope.analysis import open_run
from loopscope.analysis.health_findings import Findings, findings
from loopscope.analysis.liveness import liveness
from loopscope.cli.console import MISSING, make_console, make_table, plain

_SHOWN = 10
"""Places per rule that are printed without --every-place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alerts:
    """Print the alert rules, or replay them over a run: what lasts, what is over, since when, how far.

    Works while the run trains. Exit status 1 where something critical lasts.
    """

    path: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """Folder of the run; left out, the rules are printed."""
    warmup_steps: int | None = None
    """Steps at the start that routing and loop are not judged by; default: as the run was trained."""
    sustain: int | None = None
    """Traces in a row that must break a rule's bound before it is an alert; default: as the run was trained."""
    every_place: bool = False
    """Print every place, not the worst ten of each rule."""
    json: bool = False
    """Print one JSON object per alert, for programs."""

    def run(self) -> int:
        """Print; 0, or 1 where something critical lasts.

        Raises:
            NotARunError: `path` holds no run.
            ConfigError: a flag is wrong.
        """
        overrides = AlertOverrides(warmup_steps=self.warmup_steps, sustain=self.sustain)
        if self.path is None:
            _print_rules(overrides.on(AlertSettings()))
            return 0
        run = open_run(self.path, partial=True)
        found = findings(run, overrides)
        if self.json:
            for alert in found.alerts:
                print(json.dumps(asdict(alert)))
        else:
            console = make_console()
            name = run.manifest.run_name or run.path.name
            console.print(Text(plain(f"{name}  [{liveness(run.path)}]"), style="bold"))
            self._print(console, found)
        return 1 if found.state == "critical" else 0

    def _print(self, console: Console, found: Findings) -> None:
        console.print(Text(found.judged or "There are no rows to judge yet."))
        if changed := _changed(found.settings):
            console.print(Text(f"Bounds other than the defaults: {changed}."))
        if not found.found:
            console.print(Text("No alert."))
        rules = rules_at(found.settings)
        for finding in found.found:
            rule = rules[finding.rule]
            console.print()
            state = "over" if finding.over else finding.severity
            console.print(Text(f"{state}: {rule.title} ({rule.name})", style="bold"))
            console.print(_why(rule))
            alerts = [alert for alert in found.alerts if alert.rule == rule.name]
            if alerts:
                self._print_places(console, alerts)
            else:
                console.print(Padding(Text(plain(finding.text)), (0, 0, 0, 2)))

    def _print_places(self, console: Console, alerts: list[Alert]) -> None:
        alerts = sorted(alerts, key=lambda a: (a.cleared is not None, a.severity != "critical", -a.worst))
        shown = alerts if self.every_place else alerts[:_SHOWN]
        left = ("place", "severity", "worst")
        table = make_table(("place", "severity", "since", "told", "ended", "worst"), left=left)
        for alert in shown:
            ended = MISSING if alert.cleared is None else str(alert.cleared)
            cells = (alert.subject, alert.severity, str(alert.since), str(alert.fired), ended, alert.text)
            # Health rows' texts come from anywhere: they are text, neither markup nor orders to the terminal.
            table.add_row(*(Text(plain(cell)) for cell in cells))
        console.print(Padding(table, (0, 0, 0, 2)))
        if len(shown) < len(alerts):
            console.print(Text(f"  and {len(alerts) - len(shown)} more; --every-place prints them all"))


def _print_rules(settings: AlertSettings) -> None:
    console = make_console()
    console.print(
        Text(
            f"Routing and loop are judged after {settings.warmup_steps} steps, by {settings.sustain} traces in a row "
            f"that break a bound; an alert ends where the value is back at {settings.clear_at:.0%} of it."
        )
    )
    for rule in rules_at(settings).values():
        console.print()
        console.print(Text(f"{rule.name}: {rule.title}", style="bold"))
        console.print(_why(rule))


def _why(rule: Rule) -> Padding:
    at_once = "; told at once" if rule.at_once else ""
    return Padding(Text(f"bound: {rule.bound}{at_once}\nwhy:   {rule.why}"), (0, 0, 0, 2))


def _changed(settings: AlertSettings) -> str:
    plain = AlertSettings()
    names = [field.name for field in fields(AlertSettings) if field.name != "off"]
    found = [
        f"{name} {getattr(settings, name):g}"
        for name in names
        if getattr(settings, name) != getattr(plain, name)
    ]
    if settings.off:
        found.append(f"off: {', '.join(settings.off)}")
    return ", ".join(found)

"""Two sides of runs against each other: configuration first, then every metric by block, loop step and layer."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loopscope.analysis.probes import require_same_corpus
from loopscope.analysis.records import records, value
from loopscope.analysis.run import Run
from loopscope.analysis.scope import scope_of
from loopscope.catalog.gauge import equal_sql
from loopscope.catalog.registry import TABLES
from loopscope.errors import ProbeError

By = Literal["run", "block", "loop_step", "layer"]

# Of the run itself, not of how it was trained.
_OWN = ("loopscope.out", "loopscope.run_name", "trainer.loopscope.out", "trainer.loopscope.run_name")

# What rows are grouped by; None where a table has no such coordinate.
_GROUPS: Mapping[tuple[str, By], str] = {
    ("loss", "run"): "'all steps'",
    ("probe_loss", "run"): "corpus_name",
    **{(table, "block"): "block" for table in ("router", "residual")},
    **{(table, "loop_step"): "'loop step ' || loop_step" for table in ("router", "residual")},
    **{(table, "layer"): "'layer ' || layer_idx" for table in ("router", "residual")},
    ("transition", "loop_step"): "'loop step ' || to_loop_step",
    ("transition", "layer"): "'layer ' || to_layer_idx",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A value of the configuration that is not the same on both sides."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One metric in one place on both sides."""

    table: str
    metric: str
    place: str
    a: float | None
    b: float | None
    spread_a: float | None
    """Standard deviation over the side's runs, ddof 1; None with one run."""
    spread_b: float | None
    beyond: bool | None
    """True where the difference is above twice its standard error over runs; None with one run on a side."""

    @property
    def change(self) -> float | None:
        """b − a."""
        return None if self.a is None or self.b is None else self.b - self.a


def settings_between(a: Sequence[Run], b: Sequence[Run]) -> list[Setting]:
    """Settings, versions and facts that differ between the sides; a side whose runs differ shows all its values."""
    sides = [[_flat(run) for run in side] for side in (a, b)]
    names = sorted({name for side in sides for run in side for name in run} - set(_OWN))
    texts = [
        [" | ".join(dict.fromkeys(run.get(name, "(not set)") for run in side)) for name in names]
        for side in sides
    ]
    return [Setting(name=name, a=a, b=b) for name, a, b in zip(names, *texts, strict=True) if a != b]


def window_of(runs: Sequence[Run], share: float = 0.2) -> tuple[int, int] | None:
    """First and last step of the last `share` of the steps that all runs have; None where a run has none."""
    lasts: list[Any] = [
        value(run, "select max(step) from loss") if "loss" in run.tables else None for run in runs
    ]
    if not lasts or None in lasts:
        return None
    end = int(min(lasts))
    return max(1, math.floor(end * (1 - share)) + 1), end


def differences(a: Sequence[Run], b: Sequence[Run], window: tuple[int, int], by: By) -> list[Difference]:
    """Every metric's mean over the window's rows: per visit first, then over the visits of a place.

    A quotient of counts, such as a load entropy, is never pooled over layers: it is averaged over visits. Losses of
    probes over different tokens are left out; `corpora_apart` says which.
    """
    apart = {("probe_loss", corpus) for corpus in corpora_apart(a, b, window)}
    sides = [[_means(run, window, by) for run in side] for side in (a, b)]
    keys = dict.fromkeys(
        key for side in sides for run in side for key in run if (key[0], key[2]) not in apart
    )
    found = []
    for table, metric, place in keys:
        values = [[v for run in side if (v := run.get((table, metric, place))) is not None] for side in sides]
        means = [statistics.fmean(side) if side else None for side in values]
        spreads = [statistics.stdev(side) if len(side) > 1 else None for side in values]
        found.append(
            Difference(
                table=table, metric=metric, place=place, a=means[0], b=means[1], spread_a=spreads[0],
                spread_b=spreads[1], beyond=_beyond(values, means, spreads),
            )
        )  # fmt: skip
    return found


def corpora_apart(a: Sequence[Run], b: Sequence[Run], window: tuple[int, int]) -> dict[str, str]:
    """Corpus name → why its losses cannot be compared: both hashes, where runs have other tokens under one name."""
    sides: list[dict[str, list[str]]] = [{}, {}]
    query = f"select distinct corpus_name, corpus_hash from probe_loss where {_last(window)}"
    for side, runs in zip(sides, (a, b), strict=True):
        for run in (run for run in runs if "probe_loss" in run.tables):
            for name, tokens in run.sql(query).fetchall():
                side.setdefault(str(name), []).append(tokens)
    found = {}
    for name in (name for name in sides[0] if name in sides[1]):
        try:
            require_same_corpus(sides[0][name], sides[1][name])
        except ProbeError as error:
            found[name] = str(error)
    return found


def _last(window: tuple[int, int]) -> str:
    # Probes are rare: the window may hold none, the last one before its end is what can be compared.
    return f"step = (select max(step) from probe_loss where step <= {window[1]})"


def _beyond(
    values: Sequence[Sequence[float]], means: Sequence[float | None], spreads: Sequence[float | None]
) -> bool | None:
    (mean_a, mean_b), (spread_a, spread_b) = means, spreads
    if mean_a is None or mean_b is None or spread_a is None or spread_b is None:
        return None
    return abs(mean_b - mean_a) > 2 * math.sqrt(spread_a**2 / len(values[0]) + spread_b**2 / len(values[1]))


def _means(run: Run, window: tuple[int, int], by: By) -> dict[tuple[str, str, str], float | None]:
    found: dict[tuple[str, str, str], float | None] = {}
    for (table, grouped_by), place in _GROUPS.items():
        if grouped_by != by or table not in run.tables:
            continue
        spec = TABLES[table]
        metrics = [column.name for column in spec.shown("diff")]
        visit = next((name for name in ("unrolled_pos", "to_pos") if name in spec.names), "0")
        means = ", ".join(f"avg({metric}) as {metric}" for metric in metrics)
        steps = _last(window) if table == "probe_loss" else f"step between {window[0]} and {window[1]}"
        query = (
            f"select place, {means} from (select {place} as place, {visit} as visit, {means} from {table} where "
            f"{scope_of(run, table).where} and {equal_sql(spec.shown_rows)} and ({place}) is not null and {steps} "
            "group by all) group by place order by min(visit)"
        )
        for row in records(run, query):
            found |= {(table, metric, str(row["place"])): row[metric] for metric in metrics}
    return found


def _flat(run: Run) -> dict[str, str]:
    manifest = run.manifest
    facts: dict[str, Any] = {
        **manifest.configuration,
        "version": manifest.versions,
        "trace_meta": manifest.trace_meta or {},
        "corpus": manifest.corpora,
        "ranks": sorted({a.world_size for a in run.attempts}),
    }
    # A path below the run's own folder is the same setting in every run.
    own = str(manifest.configuration.get("loopscope", {}).get("out") or run.path)
    return {name: text.replace(own, "RUN") for name, text in _leaves("", facts)}


def _leaves(name: str, given: Any) -> Iterator[tuple[str, str]]:
    if isinstance(given, Mapping):
        for key, inner in given.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(given, list) and given and all(isinstance(item, Mapping) for item in given):
        for index, inner in enumerate(given):
            yield from _leaves(f"{name}[{index}]", inner)
    elif " at 0x" not in str(given):  # an object's address differs between any two processes
        yield name, str(given)

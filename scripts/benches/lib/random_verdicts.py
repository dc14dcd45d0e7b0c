"""Judges a random training: bit-equal to the one without loopscope, and rows equal to the oracle's."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_configurations import Configuration, build
from random_families import LOOPED
from random_oracle import Forward, Oracle
from random_trainings import Ending, plan_of, train

import loopscope
from loopscope.capture.errors import CoverageError, PlanError
from loopscope.errors import UnsupportedError

ABOUT_THE_MODEL = tuple(
    (severity, event)
    for severity in ("warn", "critical")
    for event in ("alert", "nonfinite", "nonfinite_loss")
)
"""Events that say something of the model, not of its capture."""
CLEAR_WORDS = ("capture_failed", "no_trace", "rank_failed")
"""Events of a step that has no rows; with the last one, rows that lack the tokens of a rank."""
_TABLES = ("router", "residual", "transition")


@dataclass
class Verdict:
    """What was found in one configuration."""

    configuration: str
    number: int
    refused: str = ""
    """attach's own refusal, before training."""
    does_not_train: str = ""
    """The training fails without loopscope, and with it by the same error."""
    differs: list[str] = field(default_factory=list)
    """What of the training is not bit-equal."""
    wrong: list[str] = field(default_factory=list)
    """Rows that say something else than the oracle."""
    missing: list[str] = field(default_factory=list)
    """Rows that are not there, without a word."""
    told: list[str] = field(default_factory=list)
    """Steps that have no rows, each with its critical event."""
    alarms: list[str] = field(default_factory=list)
    """Other critical events, and visits that are said to be missing."""
    unproven: str = ""
    """Nobody can say from outside what experts were handed."""
    rows: int = 0
    """Rows that were compared."""

    @property
    def good(self) -> bool:
        """Nothing to be said against it."""
        return not (self.differs or self.wrong or self.missing or self.alarms)

    def plain(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


def judged(configuration: Configuration, folder: Path) -> Verdict:
    """Train both ways and compare; called on every rank, and true on each."""
    verdict = Verdict(str(configuration), configuration.number)
    try:
        model = build(configuration)
        loopscope.attach(model, out=folder / "never", plan=plan_of(configuration, model))
    except (PlanError, CoverageError, UnsupportedError) as error:
        verdict.refused = f"{type(error).__name__}: {error}"
        return verdict
    oracle = Oracle(configuration)
    plain = train(configuration, oracle=oracle)
    out = folder / f"run{configuration.number}"
    watched = train(configuration, out=out)
    endings, forwards = _of_all_ranks(configuration, (plain, watched), dict(oracle.forwards))
    verdict.does_not_train = next((one.error for one, _ in endings if one.error), "")
    verdict.differs = _differences(endings)
    if configuration.ranks == 1 or dist.get_rank() == 0:
        if not verdict.does_not_train:
            _Comparison(configuration, loopscope.open_run(out), forwards, verdict).all()
        shutil.rmtree(out, ignore_errors=True)
    return verdict


def _of_all_ranks(configuration: Configuration, endings: Any, forwards: Any) -> tuple[list[Any], list[Any]]:
    if configuration.ranks == 1:
        return [endings], [forwards]
    gathered: list[Any] = [None] * configuration.ranks
    dist.all_gather_object(gathered, (endings, forwards))
    return [one for one, _ in gathered], [one for _, one in gathered]


def _differences(endings: list[tuple[Ending, Ending]]) -> list[str]:
    found = []
    for rank, (plain, watched) in enumerate(endings):
        if watched.error != plain.error:
            found.append(
                f"rank {rank} raised {watched.error or 'nothing'}, {plain.error or 'nothing'} without"
            )
        found += [
            f"rank {rank}: {name}"
            for name, value in asdict(plain).items()
            if name != "error" and value != getattr(watched, name)
        ]
    return found


class _Comparison:
    """The rows of one run with the forwards of all ranks: rank → step → forwards."""

    def __init__(
        self,
        configuration: Configuration,
        run: Any,
        forwards: list[dict[int, list[Forward]]],
        verdict: Verdict,
    ) -> None:
        self.configuration, self.verdict = configuration, verdict
        self.forwards = {step: [each for rank in forwards for each in rank[step]] for step in forwards[0]}
        self.tables = {name: run.arrow(name).to_pylist() for name in (*_TABLES, "loss", "health")}
        self.half = configuration.dtype != "fp32"

    def all(self) -> None:
        """Fill in the verdict."""
        self._events()
        steps = [step for step in self.forwards if step not in self._told]
        for name in (*_TABLES, "loss"):
            for step in sorted({row["step"] for row in self.tables[name]} - {*self.forwards}):
                self.verdict.wrong.append(f"{name} has rows of step {step}, which nobody trained")
        for step in self._told:
            self.verdict.wrong += [
                f"{name} has rows of step {step}, which is said to have none"
                for name in _TABLES
                if step not in self._partial and any(row["step"] == step for row in self.tables[name])
            ]
        for step in steps:
            self._step(step, self.forwards[step])
        for step in self.forwards:
            self._loss(step, self.forwards[step])

    def _events(self) -> None:
        events = [row for row in self.tables["health"] if row["severity"] != "info"]
        texts = {id(row): f"{row['event']} at step {row['step']}: {row['detail']}" for row in events}
        self._told = {
            row["step"]: texts[id(row)]
            for row in events
            if row["event"] in CLEAR_WORDS and row["severity"] == "critical"
        }
        self._partial = {row["step"] for row in events if row["event"] == "rank_failed"}
        self.verdict.alarms = [
            texts[id(row)]
            for row in events
            if row["step"] not in self._told and (row["severity"], row["event"]) not in ABOUT_THE_MODEL
        ]
        self.verdict.told = [*self._told.values()]

    def _step(self, step: int, forwards: list[Forward]) -> None:
        silent = not self.configuration.is_strict and not all(forward.handed for forward in forwards)
        if silent or any(forward.unproven for forward in forwards):
            self.verdict.unproven = (
                f"step {step}: experts were handed something of which nobody knows whose it is"
            )
            return
        deepest = max(len(forward.layers) for forward in forwards)
        places = [self._place(forward, deepest) for forward in forwards]
        self._table("router", step, dict(self._routers(forwards, places)))
        residuals = dict(self._residuals(forwards, places))
        rows = [row for row in self.tables["residual"] if row["step"] == step]
        if self.configuration.is_strict or len(rows) == len(residuals):
            self._table("residual", step, residuals)
        if self.configuration.family == LOOPED and len({*map(tuple, places)}) == 1:
            self._transitions(step, forwards)

    def _place(self, forward: Forward, deepest: int) -> list[int]:
        """Position of each layer's call: of the deepest forward, to whose end the coda moves."""
        count = len(forward.layers)
        return [*range(count - 1), deepest - 1] if self.configuration.family == LOOPED else [*range(count)]

    def _routers(
        self, forwards: list[Forward], places: list[list[int]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        by: dict[int, list[Any]] = {}
        for forward, place in zip(forwards, places, strict=True):
            for order, handed in enumerate(forward.handed):
                by.setdefault(place[handed.layer] if self.configuration.is_strict else order, []).append(
                    handed
                )
        for position, all_handed in by.items():
            size = max(len(each.counts) for each in all_handed)
            right: dict[str, Any] = {
                "expert_count": [
                    sum(column) for column in zip(*(each.counts for each in all_handed), strict=True)
                ],
                "num_tokens": sum(each.tokens for each in all_handed),
            }
            if self.configuration.is_strict:
                right |= {"num_experts": size, "top_k": max(each.top_k for each in all_handed)}
                if all(each.mass is not None for each in all_handed):
                    right["expert_mass"] = [
                        math.fsum(column) for column in zip(*(each.mass for each in all_handed), strict=True)
                    ]
            yield position, right

    def _residuals(
        self, forwards: list[Forward], places: list[list[int]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        by: dict[int, list[float]] = {}
        for forward, place in zip(forwards, places, strict=True):
            for position, layer in zip(place, forward.layers, strict=True):
                by.setdefault(position, []).extend(layer.norms)
        for position, norms in by.items():
            yield position, {"num_tokens": len(norms), "norm_mean": math.fsum(norms) / len(norms)}

    def _table(self, table: str, step: int, right: dict[int, dict[str, Any]]) -> None:
        rows = sorted(
            (row for row in self.tables[table] if row["step"] == step), key=lambda row: row["unrolled_pos"]
        )
        found = {row["unrolled_pos"]: row for row in rows}
        if len(found) != len(rows):
            self.verdict.wrong.append(f"{table} of step {step} has two rows of one visit")
        if not self.configuration.is_strict and len(rows) == len(right):
            found = dict(enumerate(rows))
        deepest = max(right) if right else 0
        for position, values in sorted(right.items()):
            if (row := found.pop(position, None)) is None:
                self.verdict.missing.append(f"{table} of step {step}, visit {position}")
                continue
            self.verdict.rows += 1
            if self.configuration.is_strict:
                values = {**values, **self._address(position, deepest)}
            self.verdict.wrong += [
                f"{table} of step {step}, visit {position}: {name} is {row[name]}, {value} expected"
                for name, value in values.items()
                if not self._same(name, row[name], value)
            ]
        self.verdict.wrong += [f"{table} has a row of step {step}, visit {extra}" for extra in found]

    def _address(self, position: int, deepest: int) -> dict[str, Any]:
        if self.configuration.family != LOOPED:
            return {"block": "loop", "loop_step": 0, "layer_idx": position}
        if position in (0, deepest):
            return {"block": "head" if position == 0 else "tail", "loop_step": None, "layer_idx": None}
        passed, layer = divmod(position - 1, 2)
        return {"block": "loop", "loop_step": passed, "layer_idx": layer}

    def _same(self, name: str, got: Any, right: Any) -> bool:
        if name == "expert_count":  # what computes nothing has no row
            return list(got) == list(right)[: len(got)] or list(right) == list(got)[: len(right)]
        if name == "norm_mean":
            return not math.isfinite(right) or (got is not None and math.isclose(got, right, rel_tol=1e-5))
        if name == "expert_mass":
            if got is None:  # said to be so where a weight is not finite
                return not all(map(math.isfinite, right))
            tolerance = 2e-2 if self.half else 1e-4
            return all(
                math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
                for a, b in zip(got, right, strict=True)
            )
        return bool(got == right)

    def _transitions(self, step: int, forwards: list[Forward]) -> None:
        """Every pair of positions that has a row moved as far as the hidden states say; each pass has one."""
        rows = [row for row in self.tables["transition"] if row["step"] == step]
        states = [
            torch.cat([forward.layers[position].hidden for forward in forwards])  # type: ignore[arg-type]
            for position in range(len(forwards[0].layers))
        ]
        pairs = {(row["from_pos"], row["to_pos"]) for row in rows}
        for position in range(1, len(states) - 3):
            if (position, position + 2) not in pairs:
                self.verdict.missing.append(f"transition of step {step}, {position} → {position + 2}")
        for row in rows:
            before, after = states[row["from_pos"]], states[row["to_pos"]]
            right = float(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean())
            self.verdict.rows += 1
            got = row["relative_delta"]
            if math.isfinite(right) and not (got is not None and math.isclose(got, right, rel_tol=1e-4)):
                where = f"{row['kind']} {row['from_pos']} → {row['to_pos']}"
                self.verdict.wrong.append(f"transition of step {step}, {where}: {got}, {right} expected")

    def _loss(self, step: int, forwards: list[Forward]) -> None:
        rows = [row for row in self.tables["loss"] if row["step"] == step]
        if len(rows) != 1:
            self.verdict.missing.append(f"loss of step {step}: {len(rows)} rows")
            return
        self.verdict.rows += 1
        for column, right in self._losses(forwards):
            got = rows[0][column]
            # The cross-entropy of the model is in its own dtype.
            tolerance = 2e-2 if column == "task_loss" else 1e-6
            if got is not None and not math.isclose(got, right, rel_tol=tolerance):
                self.verdict.wrong.append(f"loss of step {step}: {column} is {got}, {right} expected")
            if got is None and math.isfinite(right):
                self.verdict.missing.append(f"loss of step {step}: {column} is null")

    def _losses(self, forwards: Sequence[Forward]) -> Iterator[tuple[str, float]]:
        if self.configuration.loss == "loop":  # as it was logged: one number of rank 0
            return
        yield "total_loss", math.fsum(each.total for each in forwards) / len(forwards)
        tasks = [each.task for each in forwards if each.task is not None]
        if len(tasks) == len(forwards):
            yield "task_loss", math.fsum(tasks) / len(tasks)

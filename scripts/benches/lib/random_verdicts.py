"""Judges a random training: bit-equal to the one without loopscope, and rows equal to the oracle's."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from random_configurations import Configuration, build
from random_trainings import Ending, Oracle, train

import loopscope
from loopscope.capture.errors import CoverageError, PlanError
from loopscope.errors import UnsupportedError

ABOUT_THE_MODEL = ("alert", "nonfinite", "nonfinite_loss")
"""Critical events that say something of the model, not of its capture."""


@dataclass
class Verdict:
    """What was found in one configuration."""

    configuration: str
    number: int
    refused: str = ""
    """attach's own refusal, before training."""
    does_not_train: str = ""
    """The training without loopscope fails."""
    differs: list[str] = field(default_factory=list)
    """What of the training is not bit-equal."""
    wrong: list[str] = field(default_factory=list)
    """Rows that say something else than the oracle."""
    missing: list[str] = field(default_factory=list)
    """Rows that are not there."""
    alarms: list[str] = field(default_factory=list)
    """Critical events."""
    rows: int = 0
    """Rows that were compared."""

    @property
    def good(self) -> bool:
        """Nothing to be said against it."""
        return not (self.differs or self.wrong or self.missing or self.alarms or self.does_not_train)

    def plain(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


def judged(configuration: Configuration, folder: Path) -> Verdict:
    """Train both ways and compare; called on every rank, and true on each."""
    verdict = Verdict(str(configuration), configuration.number)
    try:
        loopscope.attach(build(configuration), out=folder / "never")
    except (PlanError, CoverageError, UnsupportedError) as error:
        verdict.refused = f"{type(error).__name__}: {error}"
        return verdict
    oracle = Oracle()
    plain = train(configuration, oracle=oracle)
    out = folder / f"run{configuration.number}"
    watched = train(configuration, out=out)
    endings, oracles = _of_all_ranks(configuration, (plain, watched), oracle)
    verdict.does_not_train = next((one.error for one, _ in endings if one.error), "")
    verdict.differs = _differences(endings)
    if configuration.ranks == 1 or dist.get_rank() == 0:
        if not verdict.does_not_train:
            _compare(out, len(configuration.microbatches), oracles, verdict)
        shutil.rmtree(out, ignore_errors=True)
    return verdict


def _of_all_ranks(
    configuration: Configuration, endings: tuple[Ending, Ending], oracle: Oracle
) -> tuple[list[tuple[Ending, Ending]], list[Oracle]]:
    if configuration.ranks == 1:
        return [endings], [oracle]
    oracle.counts, oracle.norms = dict(oracle.counts), dict(oracle.norms)
    oracle.task, oracle.total = dict(oracle.task), dict(oracle.total)
    gathered: list[Any] = [None] * configuration.ranks
    dist.all_gather_object(gathered, (endings, oracle))
    return [one for one, _ in gathered], [one for _, one in gathered]


def _differences(endings: list[tuple[Ending, Ending]]) -> list[str]:
    found = []
    for rank, (plain, watched) in enumerate(endings):
        if watched.error:
            found.append(f"rank {rank} raised {watched.error}")
        found += [
            f"rank {rank}: {name}"
            for name, value in asdict(plain).items()
            if name != "error" and value != getattr(watched, name)
        ]
    return found


def _compare(out: Path, steps: int, oracles: list[Oracle], verdict: Verdict) -> None:
    run = loopscope.open_run(out)
    verdict.alarms = [
        f"{row['event']} at step {row['step']}: {row['detail']}"
        for row in run.arrow("health").to_pylist()
        if row["severity"] == "critical" and row["event"] not in ABOUT_THE_MODEL
    ]
    layers = sorted({layer for oracle in oracles for _, layer in oracle.norms})
    routed = {layer: sizes for oracle in oracles for layer, sizes in oracle.experts.items()}
    for table, expected in (("router", sorted(routed)), ("residual", layers)):
        found: dict[tuple[int, int], Any] = {}
        for row in run.arrow(table).to_pylist():
            key = (row["step"], row["layer_idx"])
            if row["block"] != "loop" or row["loop_step"] != 0 or key in found:
                verdict.wrong.append(f"{table} has a row too many: {row['block']}, {row['loop_step']}, {key}")
            found[key] = row
        for key in [(step, layer) for step in range(1, steps + 1) for layer in expected]:
            if (row := found.pop(key, None)) is None:
                verdict.missing.append(f"{table} of step {key[0]}, layer {key[1]}")
                continue
            verdict.rows += 1
            wrong = _router(row, key, oracles) if table == "router" else _residual(row, key, oracles)
            verdict.wrong += [f"{table} of step {key[0]}, layer {key[1]}: {text}" for text in wrong]
        verdict.wrong += [f"{table} has a row of step {s}, layer {n}" for s, n in found]
    rows = {row["step"]: row for row in run.arrow("loss").to_pylist()}
    for step in range(1, steps + 1):
        if step not in rows:
            verdict.missing.append(f"loss of step {step}")
            continue
        verdict.rows += 1
        for column, name in (("total_loss", "total"), ("task_loss", "task")):
            values = [value for oracle in oracles for value in getattr(oracle, name)[step]]
            right, got = math.fsum(values) / len(values), rows[step][column]
            # The cross-entropy of the model is in its own dtype.
            if got is not None and not math.isclose(got, right, rel_tol=2e-2 if name == "task" else 1e-6):
                verdict.wrong.append(f"loss of step {step}: {column} is {got}, {right} expected")


def _router(row: Any, key: tuple[int, int], oracles: list[Oracle]) -> list[str]:
    num_experts, top_k = oracles[0].experts[key[1]]
    counts = [sum(oracle.counts[key][expert] for oracle in oracles) for expert in range(num_experts)]
    right = {
        "expert_count": counts,
        "num_experts": num_experts,
        "top_k": top_k,
        "num_tokens": sum(counts) // top_k,
    }
    return [f"{name} is {row[name]}, {value} expected" for name, value in right.items() if row[name] != value]


def _residual(row: Any, key: tuple[int, int], oracles: list[Oracle]) -> list[str]:
    norms = [norm for oracle in oracles for norm in oracle.norms[key]]
    right = math.fsum(norms) / len(norms)
    found = (
        []
        if row["num_tokens"] == len(norms)
        else [f"num_tokens is {row['num_tokens']}, {len(norms)} expected"]
    )
    if math.isfinite(right) and not math.isclose(row["norm_mean"] or 0.0, right, rel_tol=1e-5):
        found.append(f"norm_mean is {row['norm_mean']}, {right} expected")
    return found

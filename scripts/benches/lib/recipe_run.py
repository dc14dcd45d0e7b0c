"""Runs the recipe of one package: its block of the page, five steps, every row against our own hooks, and every loss
against that of the same training without loopscope.

    python recipe_run.py NAME RECIPES.md

Prints one JSON object.
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from recipe_subjects import BATCH, LENGTH, SUBJECTS, VOCABULARY, Subject, Visit

import loopscope
import loopscope.capture

STEPS, LINES = 5, 10


def block_of(page: Path, name: str) -> str:
    """The Python block of a package's section."""
    section = re.search(
        rf"^## {re.escape(name)}$(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE
    )
    block = section and re.search(r"```python\n(.*?)```", section[1], re.DOTALL)
    if not block:
        raise SystemExit(f"{page} has no section {name!r} with a Python block.")
    return block[1]


def compared(run: Any, expected: list[list[Visit]]) -> dict[str, list[str]]:
    """What differs between the rows and our own hooks, by kind."""
    found: dict[str, list[str]] = {"counts": [], "norms": [], "places": []}
    tables = {name: run.arrow(name).to_pylist() for name in ("router", "residual")}
    for step, visits in enumerate(expected, start=1):
        rows = {
            name: {row["unrolled_pos"]: row for row in table if row["step"] == step}
            for name, table in tables.items()
        }
        routed = [number for number, visit in enumerate(visits) if visit.top_k]
        if [*rows["residual"]] != [*range(len(visits))] or [*rows["router"]] != routed:
            have = f"{[*rows['residual']]}, {[*rows['router']]}"
            found["places"].append(f"step {step}: rows of {have}, {len(visits)} and {routed} expected")
            continue
        for number, visit in enumerate(visits):
            residual = rows["residual"][number]
            norm = math.fsum(visit.norms) / len(visit.norms)
            if not math.isclose(residual["norm_mean"], norm, rel_tol=1e-5):
                found["norms"].append(
                    f"step {step}, visit {number}: {residual['norm_mean']}, {norm} expected"
                )
            if residual["num_tokens"] != len(visit.norms):
                found["norms"].append(f"step {step}, visit {number}: {residual['num_tokens']} tokens")
            place = (residual["block"], residual["loop_step"])
            if place != (visit.block, visit.loop_step):
                found["places"].append(f"step {step}, visit {number}: {place}")
            if visit.top_k:
                router = rows["router"][number]
                got = (router["expert_count"], router["num_experts"], router["top_k"])
                right = (visit.counts, len(visit.counts or visit.mass or ()), visit.top_k)
                if got != right:
                    found["counts"].append(f"step {step}, visit {number}: {got}, {right} expected")
                if visit.mass is not None and not _close(router["expert_mass"], visit.mass):
                    found["counts"].append(
                        f"step {step}, visit {number}: {router['expert_mass']}, {visit.mass}"
                    )
    return found


def built(name: str) -> Subject:
    """The package's model; built twice, it is the same."""
    torch.manual_seed(0)
    random.seed(0)
    subject = SUBJECTS[name]()
    torch.manual_seed(1)  # of what is drawn in training
    return subject


def trained(subject: Subject, attached: Any = None) -> tuple[list[str], list[list[Visit]]]:
    """The losses of all steps bit for bit, and the visits that our own hooks saw."""
    generator = torch.Generator().manual_seed(1)
    optimizer = None if subject.step else torch.optim.SGD(subject.model.parameters(), lr=0.05)
    losses, expected = [], []
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        loss = subject.step(ids) if subject.step else subject.train(ids, optimizer)
        if attached is not None:
            attached.log_loss(loss)
        losses.append(loss.hex())
        expected.append(list(subject.visits))
    return losses, expected


def _close(found: list[float], shares: list[float]) -> bool:
    total = math.fsum(found)
    return all(
        math.isclose(one / total, share, rel_tol=1e-5) for one, share in zip(found, shares, strict=True)
    )


def main() -> int:
    """Run one recipe."""
    name, page = sys.argv[1], Path(sys.argv[2])
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"package": name}
    try:
        code = block_of(page, name)
        figures["lines"] = sum(bool(line.strip()) for line in code.splitlines())
        alone, _ = trained(built(name))
        subject = built(name)
        with tempfile.TemporaryDirectory() as folder:
            scope: dict[str, Any] = {"model": subject.model, "OUT": folder + "/run", "loopscope": loopscope}
            exec(compile(code, f"{page.name}: {name}", "exec"), scope)
            with scope["run"] as attached:
                losses, expected = trained(subject, attached)
            run = loopscope.open_run(folder + "/run")
            differing = compared(run, expected)
            differing["losses"] = [
                f"step {step}: {with_it}, {without} without loopscope"
                for step, (without, with_it) in enumerate(zip(alone, losses, strict=True), start=1)
                if without != with_it
            ]
            figures["events"] = [
                f"{row['event']}: {row['detail']}"
                for row in run.arrow("health").to_pylist()
                if row["severity"] == "critical"
            ][:2]
            figures |= {kind: texts[:2] or "equal" for kind, texts in differing.items()}
            figures["visits"] = sum(map(len, expected))
            figures["routed"] = sum(visit.top_k > 0 for visits in expected for visit in visits)
        if not figures["routed"]:
            figures["counts"] = "dense"
        figures["ok"] = not any(differing.values()) and figures["lines"] <= LINES and figures["visits"] > 0
    except Exception:  # noqa: BLE001 - whatever the package or the plan does is the finding
        figures |= {"ok": False, "error": traceback.format_exc()[-1200:]}
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

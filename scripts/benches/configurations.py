"""500 random trainings with and without loopscope: rows equal to the oracle's, trainings equal bit for bit.

    scripts/bench configurations [--count 500] [--seed 0] [--only 17 42] [--families mixtral ...] [--notes FILE]

What is drawn, and what was found, is in docs/capture/checked.md. Each configuration is trained twice, without loopscope
and with it; what both ended with is compared bit for bit, and every row with hooks on the experts' inputs, the layers'
outputs and the losses. One configuration is run again by its number and the seed. Prints a line per fault and, as its
last line, one JSON object; exits with 1 where there is any fault.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

import torch
import torch.distributed as dist
import transformers
from random_configurations import drawn
from random_families import KINDS
from random_verdicts import judged as verdict_of

TOGETHER = 25
"""Configurations of two ranks that share their processes, since starting those takes longer than a training."""


def work(options: argparse.Namespace, numbers: list[int], notes: Path) -> None:
    """Judge configurations in this process, one JSON line each; rank 0 writes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        from datetime import timedelta

        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for number in numbers:
        configuration = drawn(number, options.seed, tuple(options.families))
        began = time.monotonic()
        verdict = verdict_of(configuration, Path(options.folder))
        if int(os.environ.get("RANK", "0")) == 0:
            line = {**verdict.plain(), "good": verdict.good, "seconds": round(time.monotonic() - began, 2)}
            with notes.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if ranks > 1 and any("raised" in text for text in verdict.differs):
            break  # the group may be broken; the rest gets new processes
    if ranks > 1:
        dist.destroy_process_group()


def read(notes: Path) -> dict[int, dict[str, Any]]:
    """What was judged so far, by number."""
    if not notes.exists():
        return {}
    return {row["number"]: row for row in map(json.loads, notes.read_text().splitlines())}


def spawn(options: argparse.Namespace, numbers: list[int], ranks: int, notes: Path) -> str:
    """Judge configurations in processes of their own; what they said where they ended early."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += [
        __file__,
        "--seed",
        str(options.seed),
        "--folder",
        options.folder,
        "--notes",
        str(notes),
        "--work",
    ]
    command += ["--families", *options.families] if options.families else []
    command += ["--only", *map(str, numbers)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr[-1500:]


def judged(row: dict[str, Any]) -> bool:
    """There are rows to compare, and a training to compare them with."""
    return not (row["refused"] or row["does_not_train"] or row["unproven"])


def said(row: dict[str, Any]) -> str:
    """One line per configuration that is not good."""
    faults = [
        f"{name}: {row[name] if isinstance(row[name], str) else '; '.join(row[name][:3])} ({len(row[name])})"
        for name in ("differs", "wrong", "missing", "alarms")
        if row[name]
    ]
    return f"{row['configuration']}\n    " + "\n    ".join(faults)


def main() -> int:
    """Draw, judge, print, and say whether everything was right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers")
    parser.add_argument("--families", choices=list(KINDS), nargs="+", default=[])
    parser.add_argument("--notes", type=Path, help="note what is done here, and go on from it")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    numbers = options.only or list(range(options.first, options.first + options.count))
    if options.work:
        work(options, numbers, options.notes)
        return 0
    with tempfile.TemporaryDirectory() as name:
        options.folder = name
        notes = options.notes or Path(name) / "notes.jsonl"
        for ranks in (1, 2):
            mine = [n for n in numbers if drawn(n, options.seed, tuple(options.families)).ranks == ranks]
            tried: Counter[int] = Counter()
            while missing := [n for n in mine if n not in read(notes) and tried[n] < 2]:
                together = missing[:TOGETHER]
                error = spawn(options, together, ranks, notes)
                left = [n for n in together if n not in read(notes)]
                tried.update(left[:1])  # where the processes ended, that one is to blame
                for number in left[:1]:
                    print(f"#{number}: its processes ended early: {error.strip()[-600:]}", flush=True)
                for number in together:
                    if (row := read(notes).get(number)) is not None and not row["good"]:
                        print(said(row), flush=True)
        rows = [row for number, row in read(notes).items() if number in set(numbers)]
    figures = {
        "seed": options.seed,
        "configurations": len(numbers),
        "lost": len(numbers) - len(rows),
        "refused": sum(bool(row["refused"]) for row in rows),
        "do_not_train": sum(bool(row["does_not_train"]) for row in rows),
        "unproven": sum(bool(row["unproven"]) for row in rows),
        "judged": sum(judged(row) for row in rows),
        "good": sum(row["good"] and judged(row) for row in rows),
        "with_steps_refused_by_name": sum(bool(row["told"]) for row in rows),
        "rows_compared": sum(row["rows"] for row in rows),
        **{
            f"with_{name}": sum(bool(row[name]) for row in rows)
            for name in ("wrong", "missing", "differs", "alarms")
        },
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }
    print(json.dumps({"bench": "configurations", **figures}))
    return 0 if not figures["lost"] and all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Every MoE family that transformers ships: attached without a plan, and its rows compared with its experts' inputs.

    scripts/bench families [--only qwen3_moe,mixtral] [--again] [--memory 8] [--limit 240] [--no-page]

A small random model of each family (`scripts/benches/lib/family_models.py`) runs in a process of its own, in float32,
in bfloat16 and under bfloat16 autocast, with padding. The oracle counts the indices that the experts' modules are
handed (`scripts/benches/lib/family_check.py`); it reads no router. Verdicts are kept in `build/families.json` and asked
again where loopscope, transformers or the family's model has changed. Writes docs/capture/families.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import transformers
from lib.family_check import MODES, verdicts
from lib.family_models import OTHERWISE, SMALL, TEXT_ONLY, families
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "families.json"
PAGE = ROOT / "docs" / "capture" / "families.md"
ROOMS = ("capture", "session", "collect", "metrics", "trace")
GOAL = 55


def source_hash() -> str:
    """Of what a verdict depends on in loopscope and in the check itself."""
    found = hashlib.sha256(f"{transformers.__version__} {torch.__version__}".encode())
    files = [path for room in ROOMS for path in (ROOT / "src" / "loopscope" / room).rglob("*.py")]
    for path in sorted([*files, ROOT / "scripts" / "benches" / "lib" / "family_check.py"]):
        found.update(path.read_bytes())
    return found.hexdigest()


def key_of(family: str, source: str) -> str:
    """Changes where the verdict on a family may change."""
    model = json.dumps([SMALL, OTHERWISE.get(family), TEXT_ONLY.get(family)], sort_keys=True)
    return hashlib.sha256(f"{source} {model}".encode()).hexdigest()[:16]


def ask(family: str, memory_gib: float, limit_s: int) -> dict[str, Any]:
    """The verdicts on one family, from a process of its own: a fork, which need not import everything again."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, family, memory_gib), daemon=True)
    child.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv() if ours.poll(limit_s) else _unknown(f"not done after {limit_s} s")
    except EOFError:
        found = _unknown("its process ended: out of memory")
    child.kill()
    child.join()
    return found


def _answer(pipe: Any, family: str, memory_gib: float) -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_gib * 2**30),) * 2)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        found = verdicts(family)
    pipe.send(found)


def _unknown(why: str) -> dict[str, Any]:
    return dict.fromkeys(MODES, f"not built: {why}")


def overall(found: dict[str, Any]) -> str:
    """The worst of a family's verdicts, in one word."""
    words = {found[mode].partition(":")[0] for mode in MODES}
    return next(
        word
        for word in ("wrong", "not built", "unproven", "refused", "right", "does not run")
        if word in words
    )


def routing_text(routing: dict[str, Any] | None) -> str:
    if routing is None:
        return ""
    order = "of the chosen" if routing["order"] == "topk_then_score" else ""
    words = [f"{routing['score']} {order}".strip(), "normalised" if routing["normalised"] else "raw"]
    words += [f"× {routing['scale']:g}"] if routing["scale"] != 1.0 else []
    words += [f"{routing['groups']} groups"] if routing["groups"] else []
    return ", ".join([*words, *(["bias on the choice"] if routing["bias"] else [])])


def page(results: dict[str, dict[str, Any]]) -> str:
    """The documentation page."""
    totals = Counter(overall(found) for found in results.values())
    untried = totals["not built"] + totals["unproven"] + totals["does not run"]
    lines = [
        "# MoE families of transformers",
        "",
        f"`loopscope.attach(model)` alone, on a small random model of each of the {len(results)} families that "
        f"transformers {transformers.__version__} ships: **{totals['right']} right**, {totals['refused']} refused with "
        f"an error that says why, {totals['wrong']} wrong, {untried} not tried. "
        "Written by `scripts/bench families`.",
        "",
        "Right means: one row per call of the experts, its counts equal to the indices that the experts were handed, "
        "padding excluded, and the bias that has a part in the choice captured; in float32, bfloat16 and under "
        "bfloat16 autocast; a model that does not run in one of these by itself is judged by "
        "the others. What a refused family needs is a plan of yours (torch.md).",
        "",
        "| family | fp32 | bf16 | autocast | what its routers were found to do |",
        "|---|---|---|---|---|",
    ]
    for family, found in results.items():
        words = [found[mode].partition(":")[0] for mode in MODES]
        lines.append(f"| {family} | {' | '.join(words)} | {routing_text(found.get('routing'))} |")
    reasons = {family: reason_of(found) for family, found in results.items() if overall(found) != "right"}
    if reasons:
        lines += ["", "| not right | why |", "|---|---|"]
        lines += [f"| {family} | {reason} |" for family, reason in reasons.items()]
    return "\n".join(lines) + "\n"


def reason_of(found: dict[str, Any]) -> str:
    text = next(found[mode] for mode in MODES if not found[mode].startswith(("right", "does not run")))
    return (
        text.partition(":")[2]
        .strip()
        .partition(" loopscope.discover")[0]
        .replace("|", "/")
        .replace("\n", " ")[:240]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--again", action="store_true", help="ask again, whatever was kept")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB of address space for one family")
    parser.add_argument("--limit", type=int, default=240, help="seconds for one family")
    parser.add_argument("--no-page", action="store_true", help="leave the documentation page as it is")
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    source, wanted = source_hash(), [name for name in options.only.split(",") if name] or families()
    for family in wanted:
        key = key_of(family, source)
        if options.again or kept.get(family, {}).get("key") != key:
            kept[family] = {"key": key, **ask(family, options.memory, options.limit)}
            CACHE.parent.mkdir(exist_ok=True)
            CACHE.write_text(json.dumps(kept, indent=1, sort_keys=True))
            print(family, overall(kept[family]), file=sys.stderr, flush=True)
    results = {family: kept[family] for family in families() if family in kept}
    table = Table("family", *MODES, "routing")
    for family in wanted:
        verdicts = [kept[family][mode].partition(":")[0] for mode in MODES]
        table.add_row(family, *verdicts, routing_text(kept[family].get("routing")))
    Console(width=120).print(table)
    if not options.no_page and len(results) == len(families()):
        PAGE.write_text(page(results), encoding="utf-8")
    totals = Counter(overall(found) for found in results.values())
    print(f"goal: at least {GOAL} of {len(families())} families right, none wrong")
    print(json.dumps({"bench": "families", "goal": GOAL, "of": len(families()), **totals}))
    return 1 if totals["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

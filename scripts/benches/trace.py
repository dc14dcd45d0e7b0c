"""What tracing costs: reductions against the memory bandwidth, and training steps with and without it.

Everything is measured in one run, minima beside medians; the last line is one JSON object of the same figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "lib"))

import torch
from rich.console import Console
from rich.table import Table
from trace_reductions import make_trace, reductions
from trace_steps import steps

from loopscope.models.loopmoe import FLAVORS, build_config

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavor", default="wide", choices=sorted(FLAVORS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each reduction")
    parser.add_argument("--rounds", type=int, default=2, help="timed steps of each way to train")
    parser.add_argument("--step-batch", type=int, default=1, help="sequences of a training step")
    parser.add_argument("--step-seq", type=int, default=256, help="their length")
    parser.add_argument("--only", choices=["reductions", "steps"], help="one half only")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--dtypes", nargs="+", default=list(_TYPES), choices=list(_TYPES))
    args = parser.parse_args()

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    shape = FLAVORS[args.flavor]
    specs = build_config(shape).build().expected_visits()
    print(
        f"flavour {args.flavor}: {len(specs)} visits, {args.batch} x {args.seq} tokens, {args.device}, "
        f"{torch.get_num_threads()} thread(s), load {os.getloadavg()[0]:.1f}"
    )
    results: dict[str, dict[str, float]] = {}
    if args.only != "steps":
        for name in args.dtypes:
            sink = make_trace(
                specs, batch=args.batch, seq=args.seq, width=shape.dim, dtype=_TYPES[name], device=args.device
            )
            results[f"reductions_{name}"] = reductions(
                sink, repeats=args.repeats, device=args.device, compiled=not args.eager
            )
            show(f"reductions of one traced step, {name}", results[f"reductions_{name}"])
    if args.only != "reductions":
        results["steps"] = steps(
            args.flavor, batch=args.step_batch, seq=args.step_seq, device=args.device,
            dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
            rounds=args.rounds, compiled=not args.eager,
        )  # fmt: skip
        show("training steps", results["steps"])
    print(json.dumps({part: {k: round(v, 5) for k, v in found.items()} for part, found in results.items()}))


def show(title: str, figures: dict[str, float]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()

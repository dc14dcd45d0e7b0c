"""The long form of the isolation test: 60 steps, on one rank and on two, in every configuration that trains.

Compares a plain run with the same run probed, traced, and both, bit by bit. Prints a row per comparison and, as
its last line, one JSON object; exits with 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "tests/integrations/torchtitan/driver.py"
COMPARED = ("objectives", "parameters", "buffers", "optimizer", "dataloader", "rng")
WATCHED = {
    "probed": {"trace_every": 0, "probe_every": 1},
    "traced": {"trace_every": 1, "probe_every": 0},
    "both": {"trace_every": 2, "probe_every": 1},
}
CONFIGURATIONS = {
    "fp32": {},
    "bf16, full recompute": {"dtype": "bfloat16", "recompute": "full"},
    "bf16, selective recompute": {"dtype": "bfloat16", "recompute": "selective"},
    "bf16, full recompute, compiled": {"dtype": "bfloat16", "recompute": "full", "compile": "inductor"},
}


def prepare(folder: Path) -> dict[str, str]:
    """Tokenizer and data set of a small text."""
    import argparse as one
    import ast as two
    import typing as three

    from loopscope.integrations.torchtitan.text import prepare_text

    (folder / "text").mkdir()
    for module in (one, two, three):
        (folder / "text" / f"{module.__name__}.txt").write_text(inspect.getsource(module))
    text = prepare_text(folder / "text", folder / "prepared", 512)
    return {"tokenizer": str(text.tokenizer_path), "dataset": str(text.dataset_path)}


def train(
    folder: Path, text: dict[str, str], name: str, ranks: int, steps: int
) -> dict[str, list[dict[str, object]]]:
    """Run the plain and the watched trainings of one configuration; results by scenario and rank."""
    base = {
        **text,
        **CONFIGURATIONS[name],
        "steps": steps,
        "model": {"dropout": 0.1},
        "probe_steps": list(range(3, steps, 4)),
    }
    scenarios = []
    for kind, loopscope in {"plain": {"trace_every": 0, "probe_every": 0}, **WATCHED}.items():
        place = folder / f"{ranks}-{name}-{kind}".replace(" ", "").replace(",", "-")
        scenarios.append(
            {
                **base,
                "name": kind,
                "loopscope": {**loopscope, "on_error": "raise"},
                "out": str(place),
                "result": f"{place}.json",
            }
        )
    spec = folder / "scenarios.json"
    spec.write_text(json.dumps(scenarios))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [*command, str(DRIVER), str(spec)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return {
        s["name"]: [json.loads(Path(f"{s['result']}.{rank}").read_text()) for rank in range(ranks)]
        for s in scenarios
    }


def main() -> int:
    """Compare, print, and say whether everything was equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", choices=list(CONFIGURATIONS), nargs="+", default=list(CONFIGURATIONS))
    options = parser.parse_args()
    figures: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = prepare(folder)
        print(f"{'ranks':>5}  {'configuration':<32} {'watched':<8} {options.steps} steps against plain")
        for ranks in options.ranks:
            for configuration in options.only:
                results = train(folder, text, configuration, ranks, options.steps)
                for kind in WATCHED:
                    differing = sorted(
                        {
                            key
                            for rank in range(ranks)
                            for key in COMPARED
                            if results[kind][rank][key] != results["plain"][rank][key]
                        }
                    )
                    figures[f"{ranks} rank(s), {configuration}, {kind}"] = not differing
                    verdict = "equal, bit for bit" if not differing else "DIFFERS in " + ", ".join(differing)
                    print(f"{ranks:>5}  {configuration:<32} {kind:<8} {verdict}", flush=True)
    print(json.dumps({"steps": options.steps, "equal": figures}))
    return 0 if all(figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

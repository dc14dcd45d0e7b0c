"""The long form of the isolation test: 60 steps of every combination of ranks, dropout, precision, recompute, compile.

Each combination is trained plainly, and again probed, and probed and traced; what the runs end with is compared bit by
bit: objectives, parameters, buffers, optimizer, dataloader, random streams. Prints a row per comparison and, as its
last line, one JSON object; exits with 1 where a bit differs or a training failed.

``--results FILE`` notes every combination when it is done; the next call with the same file goes on from there.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "tests/integrations/torchtitan/driver.py"
COMPARED = ("objectives", "parameters", "buffers", "optimizer", "dataloader", "rng")
WATCHED = {
    "probed": {"trace_every": 0, "probe_every": 1},
    "both": {"trace_every": 2, "probe_every": 1},
}
DROPOUT = {"plain": {"model": {"dropout": 0.0}}, "dropout": {"model": {"dropout": 0.1}}}
DTYPE = {"fp32": {"dtype": "float32"}, "bf16": {"dtype": "bfloat16"}}
RECOMPUTE = {name: {"recompute": name} for name in ("none", "selective", "full")}
COMPILE: dict[str, dict[str, Any]] = {"eager": {}, "compiled": {"compile": "inductor"}}
CONFIGURATIONS = {
    "-".join(names): {
        key: value
        for factor, name in zip((DTYPE, RECOMPUTE, COMPILE, DROPOUT), names, strict=True)
        for key, value in factor[name].items()
    }
    for names in itertools.product(DTYPE, RECOMPUTE, COMPILE, DROPOUT)
}
"""The full product, by name: PRECISION-RECOMPUTE-COMPILE-DROPOUT."""
TOGETHER = 6
"""Combinations that share their processes, since starting those takes as long as a training."""


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


def scenarios_of(
    folder: Path, text: dict[str, str], name: str, steps: int, watched: list[str]
) -> list[dict[str, Any]]:
    """The plain training of a combination, and the watched ones."""
    kinds = {kind: WATCHED[kind] for kind in watched}
    base = {**text, **CONFIGURATIONS[name], "steps": steps, "probe_steps": list(range(3, steps, 4))}
    folder.mkdir()
    return [
        {
            **base,
            "name": kind,
            "loopscope": {**loopscope, "on_error": "raise"},
            "out": str(folder / kind),
            "result": str(folder / f"{kind}.json"),
        }
        for kind, loopscope in {"plain": {"trace_every": 0, "probe_every": 0}, **kinds}.items()
    ]


def start(folder: Path, scenarios: list[dict[str, Any]], ranks: int) -> subprocess.Popen[bytes]:
    """Run scenarios one after the other, in one process per rank."""
    spec = folder / "scenarios.json"
    spec.write_text(json.dumps(scenarios))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    with (folder / "stderr").open("wb") as errors:
        return subprocess.Popen(
            [*command, str(DRIVER), str(spec)],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def finished(scenarios: list[dict[str, Any]], ranks: int) -> bool:
    """True where every rank has said what the last of the scenarios ended with."""
    return all(Path(f"{scenarios[-1]['result']}.{rank}").exists() for rank in range(ranks))


def result_of(path: Path) -> dict[str, Any]:
    """What a training ended with; a training that left nothing is an error too."""
    if not path.exists():
        return {"error": "lost", "message": "its process ended before it"}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def verdict(
    plain: list[dict[str, Any]], watched: list[dict[str, Any]], seen: dict[str, int], expected: dict[str, int]
) -> str:
    """`equal`, or what is wrong: the parts that differ, an error, or probes and traces that did not run."""
    for result in (*plain, *watched):
        if "error" in result:
            who = "does not train" if result in plain else "FAILED"
            return f"{who}: {result['error']}: {result['message'].strip().splitlines()[-1][:200]}"
    if seen != expected:
        return f"FAILED: steps with rows {seen}, expected {expected}"
    pairs = zip(plain, watched, strict=True)
    differing = sorted({key for one, other in pairs for key in COMPARED if one[key] != other[key]})
    return "equal" if not differing else "DIFFERS in " + ", ".join(differing)


def judge(scenarios: list[dict[str, Any]], ranks: int, name: str) -> dict[str, Any]:
    """One combination: the verdict of each watched training."""
    from loopscope import open_run
    from loopscope.session.schedule import is_trace_step

    steps = scenarios[0]["steps"]
    results = {
        s["name"]: [result_of(Path(f"{s['result']}.{rank}")) for rank in range(ranks)] for s in scenarios
    }
    verdicts = {}
    for scenario in scenarios[1:]:
        kind, every = scenario["name"], scenario["loopscope"]["trace_every"]
        seen = {}
        if (Path(scenario["out"]) / "run.json").exists():
            run = open_run(scenario["out"])
            for table in ("probe_loss", "router"):
                seen[table] = run.sql(f"select count(distinct step) from {table}").fetchall()[0][0]
        traced = sum(is_trace_step(step, every=every, last_step=steps) for step in range(steps + 1))
        expected = {"probe_loss": len(scenario["probe_steps"]), "router": traced}
        verdicts[kind] = verdict(results["plain"], results[kind], seen, expected)
    graphs = max(result.get("graphs", 0) for result in results["plain"])
    return {
        "ranks": ranks,
        "configuration": name,
        "steps": steps,
        "verdicts": verdicts,
        "compiled_graphs": graphs,
    }


def compare(
    folder: Path, text: dict[str, str], ranks: int, names: list[str], steps: int, watched: list[str]
) -> Iterator[dict[str, Any]]:
    """Train some combinations, and judge each as soon as it is done."""
    scenarios = {name: scenarios_of(folder / name, text, name, steps, watched) for name in names}
    process = start(folder, [one for name in names for one in scenarios[name]], ranks)
    began = time.monotonic()
    try:
        for name in names:
            while process.poll() is None and not finished(scenarios[name], ranks):
                time.sleep(0.5)
            yield {**judge(scenarios[name], ranks, name), "seconds": round(time.monotonic() - began, 1)}
            began = time.monotonic()
            shutil.rmtree(folder / name)
        process.wait()
    finally:
        process.terminate()


def noted(file: Path | None, steps: int, watched: list[str]) -> dict[tuple[int, str], dict[str, Any]]:
    """What an earlier call with this file did, of the same length, and watched in all of these ways."""
    if file is None or not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        (row["ranks"], row["configuration"]): row
        for row in rows
        if row["steps"] == steps and row["verdicts"].keys() >= set(watched)
    }


def main() -> int:
    """Compare, print, and say whether everything was equal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", choices=list(CONFIGURATIONS), nargs="+", default=list(CONFIGURATIONS))
    parser.add_argument("--watched", choices=list(WATCHED), nargs="+", default=list(WATCHED))
    parser.add_argument("--results", type=Path, help="note what is done here, and go on from it")
    options = parser.parse_args()
    done = noted(options.results, options.steps, options.watched)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        text = prepare(Path(name))
        print(f"{'ranks':>5}  {'combination':<32} {'watched':<7}  {options.steps} steps against plain")
        for ranks in options.ranks:
            missing = [one for one in options.only if (ranks, one) not in done]
            rows += [done[ranks, one] for one in options.only if (ranks, one) in done]
            for start_at in range(0, len(missing), TOGETHER):
                folder = Path(name) / f"{ranks}-{start_at}"
                folder.mkdir()
                names = missing[start_at : start_at + TOGETHER]
                for row in compare(folder, text, ranks, names, options.steps, options.watched):
                    rows.append(row)
                    lost = any("lost:" in found for found in row["verdicts"].values())
                    if options.results is not None and not lost:  # what was cut off is tried again
                        with options.results.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                    for kind, found in row["verdicts"].items():
                        print(f"{ranks:>5}  {row['configuration']:<32} {kind:<7}  {found}", flush=True)
    verdicts = {
        f"{row['ranks']} rank(s), {row['configuration']}, {kind}": found
        for row in rows
        for kind, found in row["verdicts"].items()
    }
    equal = sum(found == "equal" for found in verdicts.values())
    print(f"{equal} of {len(verdicts)} comparisons equal, bit for bit")
    figures = {
        "steps": options.steps,
        "comparisons": len(verdicts),
        "equal": equal,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }
    print(json.dumps({**figures, "not_equal": {k: v for k, v in verdicts.items() if v != "equal"}}))
    return 0 if equal == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("driver.py")


@pytest.fixture(scope="session")
def prepared_text(tmp_path_factory):
    """A small text and its tokenizer: sources of a few modules of the standard library."""
    import argparse
    import ast
    import collections
    import typing

    from loopscope.integrations.torchtitan.text import prepare_text

    folder = tmp_path_factory.mktemp("text")
    for module in (argparse, ast, collections, typing):
        (folder / f"{module.__name__}.txt").write_text(inspect.getsource(module))
    return prepare_text(folder, tmp_path_factory.mktemp("prepared"), 512)


class Trainings:
    """What a batch of scenarios ended with, by name: `results[name][rank]`, and the runs' folders."""

    def __init__(self, root, scenarios, ranks):
        self.root, self.ranks = root, ranks
        self.results = {}
        for scenario in scenarios:
            files = [Path(scenario["result"] + f".{rank}") for rank in range(ranks)]
            self.results[scenario["name"]] = [json.loads(f.read_text()) for f in files if f.exists()]

    def __getitem__(self, name):
        return self.results[name]

    def run(self, name):
        import loopscope

        return loopscope.open_run(self.root / name)


@pytest.fixture(scope="session")
def trainings(prepared_text, tmp_path_factory, rank_processes):
    """trainings(scenarios, ranks) → Trainings; the same processes for all of them."""

    def train(scenarios, ranks, *, killed=False, torchrun=False, timeout=280):
        root = tmp_path_factory.mktemp(f"ranks{ranks}")
        for scenario in scenarios:
            scenario.setdefault("out", str(root / scenario["name"]))
            scenario["result"] = str(root / f"{scenario['name']}.json")
            scenario["tokenizer"] = str(prepared_text.tokenizer_path)
            scenario["dataset"] = str(prepared_text.dataset_path)
        spec = root / "scenarios.json"
        spec.write_text(json.dumps(scenarios))
        if torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc_per_node", str(ranks), str(DRIVER), str(spec)]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            failed, said = done.returncode != 0, done.stdout[-3000:] + done.stderr[-6000:]
        else:
            statuses, output = rank_processes.run(DRIVER, str(spec), ranks=ranks, timeout=timeout)
            failed, said = any(statuses), f"{statuses} {output[-9000:]}"
        assert failed is killed, said
        return Trainings(root, scenarios, ranks)

    return train

"""What capturing costs: one forward of a MoE with loopscope's hooks, against none, and against nnsight and torchlens.

    scripts/bench capture [--layers 6] [--width 256] [--tokens 512] [--repeats 15]

And what an untraced step costs: a training step of a tiny model that is attached, against one that is not.

Times are processor time of this process with one thread, so that other work on the machine does not count. Variants
run in turn, round after round; a ratio is the median over rounds of a variant's time by the time of the bare forward
in the same round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import loopscope
from loopscope.capture.transformers_adapter import TransformersAdapter

GOAL = 1.03
STEP_GOAL = 20.0


def build(layers: int, width: int) -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
            max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
        )
    ).train()  # fmt: skip


def variants(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    adapter = TransformersAdapter(model)

    def bare() -> None:
        model(input_ids=ids)

    def hooks() -> None:
        with adapter.listening() as window:
            model(input_ids=ids)
        assert len(window.visits) == model.config.num_hidden_layers
        window.clear()

    def points(verify: bool) -> Callable[[], None]:
        def run() -> None:
            with adapter.listening() as window:
                model(input_ids=ids)
            assert len(window.points(verify=verify)) == model.config.num_hidden_layers
            window.clear()

        return run

    found = {
        "no hooks": bare,
        "loopscope: hooks, all tensors": hooks,
        "loopscope: and trace points": points(False),
        "loopscope: and reconciled": points(True),
    }
    if importlib.util.find_spec("nnsight"):
        found["nnsight: the same tensors"] = nnsight_variant(model, ids)
    if importlib.util.find_spec("torchlens"):
        import torchlens

        found["torchlens: every tensor"] = lambda: torchlens.log_forward_pass(model, [], {"input_ids": ids})
    return found


def nnsight_variant(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    import nnsight

    observed = nnsight.NNsight(model)

    def run() -> None:
        kept = []
        with observed.trace(input_ids=ids):
            for layer in observed.model.layers:
                kept.append(layer.mlp.gate.output.save())
                kept.append(layer.output.save())
        assert len(kept) == 2 * model.config.num_hidden_layers

    return run


def measure(found: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in found}
    for run in found.values():
        run()
    for round_number in range(repeats):
        names = list(found)
        # Another order each round, so that no variant always follows the same one.
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            began = time.process_time()
            found[name]()
            times[name].append(time.process_time() - began)
    return times


def untraced_step(repeats: int, steps: int = 400) -> float:
    """Microseconds of processor time that an attached model's untraced step takes longer: median over rounds."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).train()
    optimizer, batch = torch.optim.SGD(model.parameters(), 1e-3), torch.randn(2, 3, 4)
    plan = {"?": {"tensors": {"residual": "output"}, "placements": {}, "merge": "sum"}}

    def train() -> float:
        began = time.process_time()
        for _ in range(steps):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.process_time() - began) / steps

    train()
    longer = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            bare = train()
            with loopscope.attach(
                model, out=Path(folder, str(number)), plan=plan, every=0, optimizer=optimizer
            ):
                longer.append(train() - bare)
    return 1e6 * statistics.median(longer)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("layers", 6), ("width", 256), ("tokens", 512), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build(options.layers, options.width)
    ids = torch.randint(3, 512, (4, options.tokens // 4))
    found = variants(model, ids)
    try:
        times = measure(found, options.repeats)
    except Exception as error:  # noqa: BLE001  (a tool that we do not maintain may break)
        found.pop("nnsight: the same tensors", None)
        print(f"nnsight left out: {type(error).__name__}: {error}", file=sys.stderr)
        times = measure(found, options.repeats)
    bare = times["no hooks"]
    ratios = {
        name: statistics.median(own / base for own, base in zip(values, bare, strict=True))
        for name, values in times.items()
    }
    table = Table("variant", "median CPU ms", "fastest CPU ms", "of a bare forward")
    for name, values in times.items():
        table.add_row(
            name, f"{1e3 * statistics.median(values):.1f}", f"{1e3 * min(values):.1f}", f"{ratios[name]:.3f}×"
        )
    Console(width=100).print(table)
    print(f"goal: hooks with all tensors captured at most {GOAL}× of a forward")
    microseconds = untraced_step(options.repeats)
    print(f"an untraced step takes {microseconds:.1f} µs longer; goal: at most {STEP_GOAL} µs")
    figures = {
        name: {"median_s": statistics.median(v), "min_s": min(v), "ratio": ratios[name]}
        for name, v in times.items()
    }
    print(
        json.dumps(
            {
                "bench": "capture",
                **vars(options),
                "goal": GOAL,
                "variants": figures,
                "untraced_step_us": microseconds,
                "untraced_goal_us": STEP_GOAL,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

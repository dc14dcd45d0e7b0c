"""Runs for the notebooks to look at, and how their charts look. To read a notebook you need nothing of this.

Without a run of your own, the notebooks train a looped Mixture-of-Experts model small enough for a laptop's CPU: it
reads the Python standard library byte by byte. Whatever is made here lies in a temporary folder, and goes with the
notebook's kernel. torch is imported only to train.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import altair as alt

from loopscope import LoopscopeError, open_run

Log = Callable[[dict[str, float]], object]
Block = Literal["damped", "plain", "growing"]

_KEEPERS: list[subprocess.Popen[bytes]] = []
"""Kept, because their pipes must stay open as long as this process lives."""


# -- which run -------------------------------------------------------------------------------------------------------


def newest(root: str = "../runs") -> Path | None:
    """The newest run under `root` (or under $LOOPSCOPE_RUNS) that was traced; None where there is none."""
    folders = Path(os.environ.get("LOOPSCOPE_RUNS", root)).glob("*/run.json")
    for manifest in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            if {"loss", "router", "transition"} <= set(open_run(manifest.parent).tables):
                return manifest.parent
        except LoopscopeError:
            continue
    return None


@cache
def folder() -> Path:
    """Where this notebook's runs are made; removed when its kernel ends."""
    path = tempfile.mkdtemp(prefix="loopscope-notebook-")
    # A process that waits for the end of ours: a kernel that is killed (Spark's often are) runs nothing at its exit.
    wait = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
    keeper = subprocess.Popen(
        [sys.executable, "-c", wait, path], stdin=subprocess.PIPE, start_new_session=True
    )
    _KEEPERS.append(keeper)
    return Path(path)


# -- a small training ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training of some seconds."""

    seed: int = 0
    loops: int = 6
    """R: how often the stack is run."""
    layers: int = 2
    """L: layers of the stack."""
    steps: int = 120
    lb_factor: float = 0.1
    """Weight of the load-balancing loss."""
    z_factor: float = 0.001
    lr: float = 3e-3
    trace_every: int = 4
    probe_every: int = 50
    deep: bool = False
    """Probes also read the model out after every loop step."""
    block: Block = "damped"
    """What a layer of the stack does with what it got (h) and what it adds (u): 0.8·h + u, h + u, or 1.2·h + 0.05·u."""
    wrong_sign: bool = False
    """Balances the first layer of the stack with the sign the wrong way round, from a quarter of the steps on."""


def train(
    name: str = "sample",
    recipe: Recipe | None = None,
    *,
    trackers: tuple[str, ...] = (),
    log: Log | None = None,
) -> Path:
    """Train a looped MoE on this machine's CPU and return the run's folder; `log` gets numbers of the loop's own."""
    recipe = recipe or Recipe()
    try:
        import torch
    except ImportError:
        raise SystemExit(
            "There is no run to look at, and without torch none can be trained. Set LOOPSCOPE_RUN to the folder of a "
            "run, or install torch (pip install 'loopscope[train]')."
        ) from None
    began = time.perf_counter()
    path = folder() / name
    torch.manual_seed(recipe.seed)
    _train(path, recipe, trackers, log)
    print(f"trained {recipe.steps} steps in {time.perf_counter() - began:.0f} s: {path}")
    return path


def _train(path: Path, recipe: Recipe, trackers: tuple[str, ...], log: Log | None) -> None:
    import torch
    import torch.nn.functional as F

    from loopscope import ACTIVE_TRACE_SINK, Loopscope, LossComponents

    model = _model(recipe)
    rule = _WrongSign(model.stack[0].gate, begins=recipe.steps // 4) if recipe.wrong_sign else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    corpus, text = _probe_texts(), _text()
    generator = torch.Generator().manual_seed(recipe.seed)
    config = Loopscope.Config(
        out=path, trace_every=recipe.trace_every, probe_every=recipe.probe_every, trackers=trackers
    )
    with Loopscope(config) as scope:
        scope.use_corpus(corpus)
        scope.open(
            expected_visits=model.expected_visits(), meta=model.trace_meta(), configuration=asdict(recipe)
        )
        collector = scope.begin_attempt()
        for step in range(recipe.steps + 1):
            scope.begin_step(step, tokens_seen=step * 4 * 64)
            if step > 0:
                starts = torch.randint(len(text) - 64, (4,), generator=generator).tolist()
                ids_BS = torch.stack([text[start : start + 64] for start in starts]).long()
                lr = recipe.lr * min(1.0, step / 20) * (0.55 + 0.45 * math.cos(math.pi * step / recipe.steps))
                for group in optimizer.param_groups:
                    group["lr"] = lr
                traced = scope.is_trace_step(step, recipe.steps)
                if traced:
                    ACTIVE_TRACE_SINK.arm()
                logits_BSV, lb, z = model(ids_BS)
                if traced:
                    sink = ACTIVE_TRACE_SINK.disarm()
                    collector.on_trace_step(step, sink, model.trace_meta())
                    sink.clear()
                task = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
                total = task + recipe.lb_factor * lb + recipe.z_factor * z
                optimizer.zero_grad()
                total.backward()
                norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                if rule is not None:
                    rule.after(step)
                parts = LossComponents(
                    task_loss=task.item(), lb_loss=lb.item(), lb_loss_factor=recipe.lb_factor, z_loss=z.item(),
                    z_loss_factor=recipe.z_factor, total_loss=total.item(),
                )  # fmt: skip
                collector.on_metrics_step(step, parts, norm, lr)
                if log is not None:
                    spaces = (ids_BS == ord(" ")).float().mean().item()
                    log({"train/step": step, "train/loss": parts.task_loss, "batch/spaces": spaces})
            if scope.is_probe_step(step, recipe.steps):
                _probe(model, corpus, collector, step, recipe)


def _probe(model: Any, corpus: Any, collector: Any, step: int, recipe: Recipe) -> None:
    import torch

    from loopscope import run_probe_forward

    run_probe_forward(model, torch.from_numpy(corpus.input_ids.copy()), collector=collector, step=step)
    if recipe.deep:
        from loopscope.probe.deep import DeepSettings, run_deep_probe

        deep = run_deep_probe(model, corpus, DeepSettings(shuffle_scope="document", num_directions=0))
        collector.record_rows(step, deep.tables)


def _model(recipe: Recipe) -> Any:
    from loopscope.models.toy import ToyBlock, ToyLoopMoE

    keep, add = {"damped": (0.8, 1.0), "plain": (1.0, 1.0), "growing": (1.2, 0.05)}[recipe.block]

    class Block(ToyBlock):
        def forward(self, h_BSD: Any) -> Any:
            out_BSD, *rest = super().forward(h_BSD)
            return (keep * h_BSD + add * (out_BSD - h_BSD), *rest)

    model = ToyLoopMoE(vocab_size=256, num_stacks=recipe.loops, num_layers_in_stack=recipe.layers)
    for layer in model.stack:
        layer.__class__ = Block
    return model


class _WrongSign:
    """Balancing by a bias on the router's logits, with its sign the wrong way round.

    Whoever gets much shall get more: one expert after the other falls silent.
    """

    def __init__(self, gate: Any, *, begins: int) -> None:
        import torch

        self.bias_E = torch.zeros(gate.out_features)
        self.count_E = torch.zeros(gate.out_features)
        self.begins = begins
        gate.register_forward_hook(self._add)

    def _add(self, gate: Any, given: Any, logits_BSE: Any) -> Any:
        biased_BSE = logits_BSE + self.bias_E
        if gate.training:
            chosen = biased_BSE.detach().topk(2).indices.flatten()
            self.count_E += chosen.bincount(minlength=len(self.count_E))
        return biased_BSE

    def after(self, step: int) -> None:
        if step >= self.begins:
            self.bias_E += 0.03 * (self.count_E - self.count_E.mean()).sign()
        self.count_E.zero_()


@cache
def _text() -> Any:
    """Some of the standard library's own sources: uint8 [N]."""
    import torch

    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)


@cache
def _probe_texts() -> Any:
    """The small probe corpus that comes with loopscope, a token per byte."""
    from loopscope.probe import load_corpus

    return load_corpus("core").encode(lambda text: list(text.encode("utf-8")), 64)


# -- Weights & Biases ------------------------------------------------------------------------------------------------


def wandb_offline(folder: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Configuration and history of the offline W&B runs below a folder, from their .wandb files."""
    from wandb.proto import wandb_internal_pb2

    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for path in sorted(Path(folder).glob("**/offline-run-*/*.wandb")):
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for change in (*record.run.config.update, *record.config.update):
                config[change.key or "/".join(change.nested_key)] = json.loads(change.value_json)
            if record.WhichOneof("record_type") == "history":
                # What has parts is a table or a picture, and lies in a file of its own.
                items = [item for item in record.history.item if len(item.nested_key) <= 1]
                row = {"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
                history.append({key: value for key, value in row.items() if isinstance(value, int | float)})
    return config, history


def _records(data: bytes) -> Iterator[bytes]:
    """What the file holds: LevelDB's log format, blocks of 32 KiB behind a header of 7 bytes."""
    position, parts = 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if kind == 0 or position + 7 + length > len(data):
            return
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield b"".join(parts)
            parts = []


# -- a thousand runs -------------------------------------------------------------------------------------------------


def sweep(runs: int = 1000) -> Path:
    """A sweep over learning rate and balancing weight: real files by loopscope's own writer, made-up numbers.

    One run in ten was rolled back, so that some of its steps are there twice.
    """
    began = time.perf_counter()
    root = folder() / "sweep"
    # The writer waits for the disk, many writers wait together.
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(partial(_made_up, root), range(runs)))
    print(f"wrote {runs} runs in {time.perf_counter() - began:.0f} s: {root}")
    return root


def _made_up(root: Path, index: int) -> None:
    from loopscope.store import RunStore, StoreOptions

    lr, lb_factor = (1e-4, 3e-4, 1e-3, 3e-3)[index % 4], (0.0, 0.003, 0.03)[index // 4 % 3]
    settings = {"trainer": {"lr": lr, "lb_factor": lb_factor, "seed": index // 12}}
    # No process and no clock: the defaults are for a run that lasts for weeks.
    options = StoreOptions(seal_in="thread", tick_s=3600.0)
    name = f"run-{index:04d}"
    with RunStore.create(root / name, run_name=name, configuration=settings, options=options) as store:
        for first, last, parent in [(1, 30, None), (21, 40, 1)] if index % 10 == 7 else [(1, 40, None)]:
            attempt = store.claim_attempt(first_step=first, parent_attempt=parent)
            with closing(store.writer(attempt=attempt)) as writer:
                steps = range(first, last + 1)
                writer.append_many("loss", [_loss(index, step, lr) for step in steps])
                traced = [step for step in steps if step % 10 == 0]
                writer.append_many(
                    "router", [row for step in traced for row in _routers(index, step, lb_factor)]
                )


_SHARED = {"aggregation_scope": "global", "world_size": 1}


def _loss(index: int, step: int, lr: float) -> dict[str, Any]:
    best = math.log10(lr / 1e-3) ** 2  # 1e-3 is the best of the four
    noise = 0.05 * math.sin(12.9898 * index + 78.233 * step)
    return {**_SHARED, "step": step, "task_loss": 2.2 + 0.6 * best + 4.0 / step**0.5 + noise, "lr": lr}


def _routers(index: int, step: int, lb_factor: float) -> list[dict[str, Any]]:
    rows = []
    for loop_step in range(4):
        # Later loop steps are less balanced, and more so over time, the less balancing there is.
        tilt = (
            (0.02 + 0.5 * math.exp(-lb_factor / 0.003))
            * (1 + loop_step)
            * step
            / 40
            * (1 + 0.2 * math.sin(index))
        )
        shares = [math.exp(-tilt * ((expert * 5 + index) % 8)) for expert in range(8)]
        counts = [int(2048 * share / sum(shares)) if share > 0.02 else 0 for share in shares]
        rows.append(
            {
                **_SHARED, "step": step, "block": "loop", "unrolled_pos": 1 + loop_step, "loop_step": loop_step,
                "layer_idx": 0, "num_loop_steps": 4, "num_experts": 8, "top_k": 2, "num_tokens": 1024,
                "expert_count": counts, "dead_experts": counts.count(0),
                "maxvio_count": max(counts) * 8 / sum(counts) - 1,
            }
        )  # fmt: skip
    return rows


# -- how charts look -------------------------------------------------------------------------------------------------


@alt.theme.register("loopscope", enable=True)
def _theme() -> alt.theme.ThemeConfig:
    """The colours of loopscope's report: told apart by colour-blind people too, loop steps by their brightness."""
    viridis = [
        "#440154",
        "#482878",
        "#3e4989",
        "#31688e",
        "#26828e",
        "#1f9e89",
        "#35b779",
        "#6ece58",
        "#b5de2b",
    ]
    return {
        "config": {
            "background": "white",
            "mark": {"color": "#0b5fa5"},
            "view": {"continuousWidth": 560, "continuousHeight": 220, "discreteWidth": 560, "stroke": None},
            "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "gridColor": "#e7eaed"},
            "axisX": {"grid": False},
            "legend": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "titleLimit": 260,
                       "symbolType": "stroke", "symbolStrokeWidth": 3, "symbolSize": 300},
            "title": {"anchor": "start", "fontSize": 14},
            "range": {
                "category": ["#0b5fa5", "#d06a00", "#0a7f5a", "#a3478f", "#6b6b00", "#8a2b2b", "#3b8fd6", "#555d66"],
                "ordinal": {"scheme": "viridis", "extent": [0, 0.88]},
                "heatmap": viridis, "ramp": viridis,
                "diverging": ["#08457e", "#5a9bd0", "#f4f4f2", "#f0a35a", "#8c3f00"],
            },
        }
    }  # fmt: skip


# Pictures: they show in every front end, and without a network. For charts to point at and zoom into, install anywidget
# and put alt.renderers.enable("jupyter") into a cell.
alt.renderers.enable("png", scale_factor=2)

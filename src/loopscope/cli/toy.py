"""`loopscope toy`: trains a tiny looped model in a plain PyTorch loop and proves that nothing leaks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from loopscope.cli.console import make_console, number, step_progress
from loopscope.cli.flags import check_least
from loopscope.errors import ConfigError, LeakError

if TYPE_CHECKING:
    from loopscope.integrations.toy import ToyResult
    from loopscope.trace import LoopTraceCollector

# Written out, since the list's own home needs torch; a test compares both.
Kind = Literal[
    "tensor", "view", "detach", "data", "numpy", "untyped-storage", "closure", "graph", "exception"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Toy:
    """Train a tiny looped Mixture-of-Experts model on the CPU, and check that no trace tensor outlives its use.

    Objects are checked after every callback, storages after every backward and in every probe. Exit status 0:
    nothing leaked; 1: something did, and the message names it.
    """

    out: Path
    """Folder of the run; it must not hold another run."""
    steps: int = 30
    """Optimizer steps."""
    trace_every: int = 1
    """Trace every N steps; also steps 1-10, powers of two up to 512, and the last. 0 turns tracing off."""
    probe_every: int = 10
    """Probe every M steps; also step 0 and the last. 0 turns probing off."""
    inject_leak: Kind | None = None
    """Leak on purpose, to see the check fail: what is kept of one visit's router logits."""
    seed: int = 0
    """Seed of parameters and batches."""

    def run(self) -> int:
        """Train and check; 0 when nothing leaked, 1 when something did, 2 when a setting is wrong.

        Raises:
            ConfigError: a flag is wrong; the message names it.
            RunExistsError: `out` holds another run.
        """
        check_least(self, steps=1, trace_every=0, probe_every=0, seed=0)
        if self.inject_leak is not None and self.trace_every == 0:
            raise ConfigError(
                f"--inject-leak is {self.inject_leak!r} with --trace-every 0, expected tracing: without a trace "
                "there is nothing to leak. Set --trace-every 1."
            )
        try:
            result = self._train()
        except LeakError as error:
            # Text only: the error's frames hold what leaked.
            print(f"loopscope toy: {error}", file=sys.stderr)
            return 1
        first, last = number(result.losses[0]), number(result.losses[-1])
        print(
            f"task loss       {first} at step 1, {last} at step {self.steps} (nats per character)\n"
            f"traced          {result.traced_steps} of {self.steps} steps, {result.probes} probes\n"
            f"visits checked  {result.visits_checked}\n"
            f"leaks           0\n{self.out}"
        )
        return 0

    def _train(self) -> ToyResult:
        # Here and not at the top: torch is imported by the run, not by the help.
        from loopscope.integrations.toy import (
            LeakingCollector,
            ToySettings,
            build_toy_model,
            load_toy_corpus,
            train_toy,
        )
        from loopscope.session import Loopscope

        corpus = load_toy_corpus()
        model = build_toy_model(corpus, seed=self.seed)
        config = Loopscope.Config(
            out=self.out, trace_every=self.trace_every, probe_every=self.probe_every, on_error="raise"
        )
        with Loopscope(config) as scope, step_progress(make_console(stderr=True)) as progress:
            scope.use_corpus(corpus)
            collector: LoopTraceCollector = scope.start(model)
            if self.inject_leak is not None:
                collector = LeakingCollector(collector, self.inject_leak)
            bar = progress.add_task("training", total=self.steps)

            def begin_step(step: int, tokens_seen: int) -> None:
                scope.begin_step(step, tokens_seen=tokens_seen)
                progress.update(bar, completed=step)

            settings = ToySettings(
                steps=self.steps,
                is_trace_step=lambda step: scope.is_trace_step(step, self.steps),
                is_probe_step=lambda step: scope.is_probe_step(step, self.steps),
                seed=self.seed,
            )
            return train_toy(model, corpus, collector, settings, begin_step=begin_step)

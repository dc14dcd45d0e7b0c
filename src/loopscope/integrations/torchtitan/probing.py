"""The probe of a torchtitan run: the fixed corpus through the model, on every rank alike."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from loopscope.collect import Collector
from loopscope.collect.error_text import describe
from loopscope.integrations.torchtitan.options import LoopscopeOptions
from loopscope.probe import EncodedCorpus, load_corpus
from loopscope.probe.deep import DeepSettings, chosen_experts, run_deep_probe
from loopscope.probe.deep_routing import Chosen
from loopscope.session import Loopscope
from loopscope.session.ranks import gather
from loopscope.session.schedule import is_probe_step, probe_stretch
from loopscope.trace import raised_in_probe_forward, run_probe_forward

T = TypeVar("T")

_log = logging.getLogger("loopscope.probe")


def corpus_of(config: Any, tokenizer: Any) -> EncodedCorpus:
    """The corpus of a ``LoopscopeTrainer.Config``, encoded with the run's own tokenizer.

    Raises:
        ConfigError, ProbeError: the corpus cannot be found, read or encoded, or does not fit the vocabulary.
    """
    options = config.loopscope
    corpus = load_corpus(options.probe_corpus).encode(
        tokenizer.encode, min(options.probe_seq_len, config.training.seq_len)
    )
    corpus.check_vocabulary(config.model_spec.model.vocab_size)
    return corpus


class TrainerProbe:
    """Runs the corpus of a training. Collective: every rank calls `run` at the same steps.

    Args:
        session: of the run.
        model: the trainer's.
        corpus: its tokens.
        options: period, batch size and null of the probes.
        device: where the model takes its tokens.
        last_step: of the training.
        context: makes the trainer's own context of a forward.
    """

    def __init__(
        self,
        session: Loopscope,
        model: nn.Module,
        corpus: EncodedCorpus,
        options: LoopscopeOptions,
        *,
        device: torch.device,
        last_step: int,
        context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.corpus = corpus
        self._session, self._model, self._options, self._last_step = session, model, options, last_step
        self._ids = torch.from_numpy(corpus.input_ids.copy()).to(device)
        self._forward: dict[str, Any] = {"batch_size": options.probe_batch_size, "context": context}
        self._before: tuple[int, Chosen] | None = None
        self._began, self._seconds, self._stretch = time.perf_counter(), 0.0, 1

    def run(self, step: int) -> dict[str, float]:
        """Probe the parameters as they are after update `step`; returns headline scalars.

        Where probes take too large a share of the time, the period is stretched: a step that falls out gives {}.

        Under ``on_error="record"`` a probe that fails is a health row that names the rank, whichever it is; it counts
        in that rank's `errors`. An error in the model's own forward ends the job where there are other ranks, which
        wait in a collective.
        """
        collector, options, last_step = self._collector(), self._options, self._last_step
        if self._stretch > 1 and not is_probe_step(
            step, every=options.probe_every * self._stretch, last_step=last_step
        ):
            return {}
        start = time.perf_counter()
        failures: list[str] = []
        found = self._guarded(
            failures,
            lambda: run_probe_forward(
                self._model, self._ids, collector=collector, step=step, **self._forward
            ),
        )
        if is_probe_step(step, every=options.probe_deep_every, last_step=last_step):
            self._guarded(failures, lambda: self._deep(step))
        now = time.perf_counter()
        self._seconds += now - start
        elapsed_s = now - self._began
        detail = f"{now - start:.3f} s; all probes so far: {self._seconds:.3f} s of {elapsed_s:.3f} s"
        collector.record_event(step, "probe_cost", "info", value=self._seconds / elapsed_s, detail=detail)
        # One exchange for both: what failed on any rank, and how long the period is from now on.
        by_rank = gather((failures, probe_stretch(self._seconds, elapsed_s)))
        for rank, (texts, _) in enumerate(by_rank):
            for text in texts:
                collector.record_event(step, "probe_failed", "critical", detail=f"rank {rank}: {text}")
        # Rank 0's clock decides, since every rank must probe at the same steps.
        if (stretch := by_rank[0][1]) != self._stretch:
            self._stretch, every = stretch, options.probe_every * stretch
            why = f"probes took more than 1% of the time: now every {every} steps" if stretch > 1 else None
            collector.record_event(step, "probe_stretched", "warn", value=float(stretch), detail=why)
        if step == last_step < options.probe_every:
            detail = (
                f"no probe between: probe_every is {options.probe_every}, the training has {last_step} steps"
            )
            collector.record_event(step, "probe_every_not_reached", "info", detail=detail)
            if collector.writes:
                _log.warning("loopscope: %s", detail)
        return found or {}

    def restart(self, restored: int) -> None:
        """After a restart from the checkpoint of step `restored`: run its deep probe's routing again.

        The next deep probe then has its saturation, as if the training had gone through. Where none ran at that step,
        the parameters of the one before are gone, which is said. Collective.
        """
        if not (options := self._options).probe_deep_every:
            return
        if restored % options.probe_every or restored % options.probe_deep_every:
            detail = f"saturation of the next deep probe: there was none at step {restored}, where training goes on"
            self._collector().record_event(restored + 1, "probe_skipped", "info", detail=detail)
            return
        self._guarded([], lambda: self._restore_chosen(restored))

    def _restore_chosen(self, restored: int) -> None:
        chosen = chosen_experts(self._model, self.corpus, keep=self._collector().writes, **self._forward)
        self._before = (restored, chosen)

    def _deep(self, step: int) -> None:
        collector = self._collector()
        settings = DeepSettings(shuffle_scope=self._options.probe_shuffle_scope)  # type: ignore[arg-type]  # checked there
        result = run_deep_probe(
            self._model, self.corpus, settings, before=self._before, keep=collector.writes, **self._forward
        )
        result.record(collector, step)
        self._before = (step, result.chosen)

    def _guarded(self, failures: list[str], probe: Callable[[], T]) -> T | None:
        """Run a probe; what it raises is added to `failures` as text, unless it must end the job."""
        try:
            return probe()
        except Exception as error:
            others_wait = dist.get_world_size() > 1 and raised_in_probe_forward(error)
            if self._session.config.on_error == "raise" or others_wait:
                raise
            self._collector().count_error()
            failures.append(describe(error))
            return None

    def _collector(self) -> Collector:
        assert self._session.collector is not None
        return self._session.collector

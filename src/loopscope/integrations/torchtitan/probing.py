"""The probe of a torchtitan run: the fixed corpus through the model, on every rank alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from loopscope.collect.error_text import describe
from loopscope.probe import EncodedCorpus, load_corpus
from loopscope.probe.deep import DeepSettings, chosen_experts, run_deep_probe
from loopscope.probe.deep_routing import Chosen
from loopscope.session.ranks import gather
from loopscope.session.schedule import is_probe_step, probe_stretch
from loopscope.trace import raised_in_probe_forward, run_probe_forward

if TYPE_CHECKING:
    from loopscope.integrations.torchtitan.trainer import LoopscopeTrainer

_log = logging.getLogger("loopscope.probe")


class TrainerProbe:
    """Runs the corpus of a trainer. Collective: every rank calls `run` at the same steps."""

    def __init__(self, trainer: LoopscopeTrainer, corpus: EncodedCorpus, batch_size: int) -> None:
        self._trainer = trainer
        self._ids = torch.from_numpy(corpus.input_ids.copy()).to(trainer.device)
        self._batch_size = batch_size
        self._before: tuple[int, Chosen] | None = None
        self._began = time.perf_counter()
        self._seconds = 0.0
        self._stretch = 1
        self.corpus = corpus

    @classmethod
    def build(cls, trainer: LoopscopeTrainer) -> TrainerProbe:
        """Load and encode the corpus with the run's own tokenizer.

        Raises:
            ConfigError, ProbeError: the corpus cannot be found, read or encoded, or does not fit the vocabulary.
        """
        options = trainer.config.loopscope
        seq_len = min(options.probe_seq_len, trainer.config.training.seq_len)
        corpus = load_corpus(options.probe_corpus).encode(trainer.tokenizer.encode, seq_len)
        corpus.check_vocabulary(trainer.config.model_spec.model.vocab_size)
        return cls(trainer, corpus, options.probe_batch_size)

    def run(self, step: int) -> dict[str, float]:
        """Probe the parameters as they are after update `step`; returns headline scalars.

        Where probes take too large a share of the time, the period is stretched: a step that falls out gives {}.

        Under ``on_error="record"`` a probe that fails is a health row that names the rank, whichever it is; it counts
        in that rank's `errors`. An error in the model's own forward ends
        the job where there are other ranks, which wait in a collective.
        """
        collector = self._trainer.session.collector
        assert collector is not None
        options, last_step = self._trainer.config.loopscope, self._trainer.config.training.steps
        every = options.probe_every * self._stretch
        if self._stretch > 1 and not is_probe_step(step, every=every, last_step=last_step):
            return {}
        start = time.perf_counter()
        failures: list[str] = []
        found = self._guarded(
            failures,
            lambda: run_probe_forward(
                self._trainer.model,
                self._ids,
                collector=collector,
                step=step,
                context=self._trainer.train_context,
                batch_size=self._batch_size,
            ),
        )
        if is_probe_step(step, every=options.probe_deep_every, last_step=last_step):
            self._guarded(failures, lambda: self._deep(step))
        now = time.perf_counter()
        self._seconds += now - start
        elapsed_s = now - self._began
        share = self._seconds / elapsed_s
        detail = f"{now - start:.3f} s; all probes so far: {self._seconds:.3f} s of {elapsed_s:.3f} s"
        collector.record_event(step, "probe_cost", "info", value=share, detail=detail)
        # One exchange for both: what failed on any rank, and how long the period is from now on.
        told = gather((failures, probe_stretch(self._seconds, elapsed_s)))
        for rank, (texts, _) in enumerate(told):
            for text in texts:
                collector.record_event(step, "probe_failed", "critical", detail=f"rank {rank}: {text}")
        # Rank 0's clock decides, since every rank must probe at the same steps.
        self._adapt(step, told[0][1])
        if step == last_step < options.probe_every:
            detail = (
                f"no probe between: probe_every is {options.probe_every}, the training has {last_step} steps"
            )
            collector.record_event(step, "probe_every_not_reached", "info", detail=detail)
            if collector.writes:
                _log.warning("loopscope: %s", detail)
        return found

    def restart(self, restored: int) -> None:
        """After a restart from the checkpoint of step `restored`: what the deep probe there chose, once more.

        The next deep probe then has its saturation, as if the training had gone through. Where none ran at that step,
        the parameters of the one before are gone, which is said. Collective.
        """
        options, collector = self._trainer.config.loopscope, self._trainer.session.collector
        assert collector is not None
        if not options.probe_deep_every:
            return
        if restored % options.probe_every or restored % options.probe_deep_every:
            detail = f"saturation of the next deep probe: there was none at step {restored}, where training goes on"
            collector.record_event(restored + 1, "probe_skipped", "info", detail=detail)
            return
        self._guarded([], lambda: self._choose_again(restored))

    def _choose_again(self, restored: int) -> dict[str, float]:
        assert self._trainer.session.collector is not None
        chosen = chosen_experts(
            self._trainer.model,
            self.corpus,
            batch_size=self._batch_size,
            context=self._trainer.train_context,
            keep=self._trainer.session.collector.writes,
        )
        self._before = (restored, chosen)
        return {}

    def _adapt(self, step: int, stretch: int) -> None:
        before, self._stretch = self._stretch, stretch
        collector = self._trainer.session.collector
        if collector is not None and self._stretch != before:
            every = self._trainer.config.loopscope.probe_every * self._stretch
            detail = (
                f"probes took more than 1% of the time: now every {every} steps"
                if self._stretch > 1
                else None
            )
            collector.record_event(step, "probe_stretched", "warn", value=float(self._stretch), detail=detail)

    def _deep(self, step: int) -> dict[str, float]:
        options, collector = self._trainer.config.loopscope, self._trainer.session.collector
        assert collector is not None
        result = run_deep_probe(
            self._trainer.model,
            self.corpus,
            DeepSettings(shuffle_scope=options.probe_shuffle_scope),  # type: ignore[arg-type]  # checked there
            batch_size=self._batch_size,
            context=self._trainer.train_context,
            before=self._before,
            keep=collector.writes,
        )
        collector.record_rows(step, result.tables)
        for text in result.skipped:
            collector.record_event(step, "probe_skipped", "warn", detail=text)
        self._before = (step, result.chosen)
        return {}

    def _guarded(self, failures: list[str], probe: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run a probe; what it raises is added to `failures` as text, unless it must end the job."""
        try:
            return probe()
        except Exception as error:
            others_wait = dist.get_world_size() > 1 and raised_in_probe_forward(error)
            if self._trainer.session.config.on_error == "raise" or others_wait:
                raise
            collector = self._trainer.session.collector
            assert collector is not None
            collector.errors += 1
            failures.append(describe(error))
            return {}

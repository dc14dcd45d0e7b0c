"""torchtitan's trainer with loopscope inside: loss rows every step, traces and probes at theirs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer

from loopscope.capture.runtime import ForwardObserver
from loopscope.collect import GroupReducer
from loopscope.integrations.torchtitan.checks import check_config, check_model, check_support
from loopscope.integrations.torchtitan.grad_norm import GradNorm, captured_grad_norm
from loopscope.integrations.torchtitan.moe_adapter import is_torchtitan_moe, observe
from loopscope.integrations.torchtitan.objective import AuxScale, StepLosses, device_loss
from loopscope.integrations.torchtitan.options import LoopscopeOptions
from loopscope.integrations.torchtitan.probing import TrainerProbe, corpus_of
from loopscope.integrations.torchtitan.trackers import FLAGS, share_loggers, tracker_names
from loopscope.integrations.torchtitan.warm_up import compile_reductions
from loopscope.session import Loopscope
from loopscope.session.ranks import decide
from loopscope.trace import ACTIVE_TRACE_SINK, TraceSink

_RUN_ID, _ATTEMPT = "loopscope_run_id", "loopscope_attempt"


class LoopscopeTrainer(Trainer):
    """Drop-in for torchtitan's Trainer, for models with the trace contract.

    The model has ``expected_visits()`` and ``trace_meta()`` and records TracePoints in ACTIVE_TRACE_SINK. One
    that also has ``aux_loss_factors()`` takes ``return_aux=True`` and then returns (output, lb_loss, z_loss);
    the auxiliary losses are added to the objective here, scaled so that they are an equal-weight mean over
    ranks and microbatches.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration and ours."""

        loopscope: LoopscopeOptions = field(default_factory=LoopscopeOptions)
        """What loopscope records, and where."""

    config: Config

    def __init__(self, config: Config) -> None:
        check_config(config)
        check_support(config)
        settings = config.loopscope.to_config(tracker_names(config))
        config.dump_folder = str(Path(settings.out) / "torchtitan")
        self._loaded: dict[str, Any] = {}
        self._headline: dict[str, float] = {}
        self._norm, self._losses = GradNorm(), StepLosses()
        self._microbatch, self._loss_submitted, self._tracing = 0, False, False
        self._lr: float | None = None
        self._observer: ForwardObserver | None = None
        self.session = Loopscope(settings)
        super().__init__(config)
        self.model = self.model_parts[0]
        # torchtitan's own MoE models get the trace contract through hooks; ours have it.
        self._observer = observe(self.model) if is_torchtitan_moe(self.model) else None
        check_model(self.model)
        # The ranks that hold different tokens.
        mesh = self.parallel_dims.get_optional_mesh("loss")
        self._has_aux = hasattr(self.model, "aux_loss_factors")
        lb_factor, z_factor = self.model.aux_loss_factors() if self._has_aux else (0.0, 0.0)
        self._scale = AuxScale(
            lb_factor=lb_factor,
            z_factor=z_factor,
            num_ranks=1 if mesh is None else mesh.size(),
            num_microbatches=self.gradient_accumulation_steps,
        )
        self.session.open(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            decide=decide,
            reducer=None if mesh is None else GroupReducer(self.device, mesh.get_group()),
            expected_visits=self.model.expected_visits(),
            meta=self.model.trace_meta(),
            configuration=config.to_dict(),
        )
        self._probe: TrainerProbe | None = None
        if settings.probe_every:
            corpus = corpus_of(config, self.tokenizer)
            self._probe = TrainerProbe(
                self.session,
                self.model,
                corpus,
                config.loopscope,
                device=self.device,
                last_step=config.training.steps,
                context=self.train_context,
            )
            self.session.use_corpus(corpus)
        self.session.share_trackers(share_loggers(self.metrics_processor, settings, self._logger_failed))
        self._has_trackers = any(name in FLAGS for name in settings.trackers)
        self._log = self.metrics_processor.log
        self.metrics_processor.log = self._log_with_headline

    # -- one optimizer step ---------------------------------------------------------------------------------

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """One optimizer step; its loss row, and the probe that follows it, are written before it returns."""
        session, last_step = self.session, self.config.training.steps
        if session.collector is None:
            self._begin_attempt()
        session.begin_step(self.step, tokens_seen=self._tokens_after_this_step())
        self._losses, self._microbatch, self._loss_submitted = StepLosses(), 0, False
        self._lr = self._learning_rate()
        self._tracing = session.is_trace_step(self.step, last_step)
        with captured_grad_norm() as self._norm:
            super().train_step(data_iterator)
        if not self._loss_submitted:
            self._submit_loss(wait=False)
        if self._probe is not None and session.is_probe_step(self.step, last_step):
            self._probe.run(self.step)

    def _forward_backward_body(
        self, inputs: Tensor, labels: Tensor, global_valid_tokens: Tensor, extra_kwargs: dict[str, Any]
    ) -> Tensor:
        """Forward, objective, backward; the sink is armed for the forward alone.

        Returns this microbatch's part of the objective, which torchtitan sums for its own log.
        """
        with self.train_context():
            output, lb_loss, z_loss = self._forward(inputs, extra_kwargs)
            loss_kwargs = {k: extra_kwargs[k] for k in ("positions",) if k in extra_kwargs}
            task, _ = self.loss_fn(output, labels, global_valid_tokens, **loss_kwargs)
            del output
            objective = self._scale.add(task, lb_loss, z_loss)
            objective.backward()  # type: ignore[no-untyped-call]
        self._note(task, lb_loss, z_loss, objective, labels, global_valid_tokens)
        self._microbatch += 1
        return objective.detach()

    def _forward(self, inputs: Tensor, extra_kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        if self._tracing:
            ACTIVE_TRACE_SINK.arm()
        try:
            if self._has_aux:
                output, lb_loss, z_loss = self.model(inputs, **extra_kwargs, return_aux=True)
            else:
                output = self.model(inputs, **extra_kwargs)
                lb_loss = z_loss = torch.zeros((), device=inputs.device)
        finally:
            # Closed before backward, so that recompute cannot record; also when the forward fails.
            window = ACTIVE_TRACE_SINK.disarm() if self._tracing else None
        if window is not None:
            try:
                self._reduce(window)
            finally:
                window.clear()
        return output, lb_loss, z_loss

    def _reduce(self, window: TraceSink) -> None:
        assert self.session.collector is not None
        self._headline |= self.session.collector.on_trace_step(
            self.step,
            window,
            self.model.trace_meta(),
            microbatch=self._microbatch,
            num_microbatches=self.gradient_accumulation_steps,
        )

    def _note(
        self,
        task: Tensor,
        lb_loss: Tensor,
        z_loss: Tensor,
        objective: Tensor,
        labels: Tensor,
        num_global: Tensor,
    ) -> None:
        losses = self._losses
        losses.task.append(task.detach())
        losses.lb.append(lb_loss.detach())
        losses.z.append(z_loss.detach())
        losses.objective.append(objective.detach())
        losses.targets.append((labels != IGNORE_INDEX).sum())
        losses.global_targets = num_global

    # -- rows of a step -------------------------------------------------------------------------------------

    def _submit_loss(self, *, wait: bool) -> None:
        self._loss_submitted = True
        loss = device_loss(self._losses, self._scale, grad_norm=self._norm.total, lr=self._lr)
        self._losses = StepLosses()
        assert self.session.collector is not None
        self._headline.update(self.session.collector.submit_loss(self.step, loss, wait=wait))

    def _log_with_headline(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """torchtitan's log call, with the headline scalars of this step beside its own metrics.

        Where W&B or TensorBoard is on, they have them already: from the rows, each at the step it belongs to.
        """
        # The trainer has just waited for this step's values, so waiting for ours costs nothing.
        self._submit_loss(wait=True)
        headline = {} if self._has_trackers else self._headline
        self._log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **headline})
        self._headline = {}

    def _logger_failed(self, detail: str) -> None:
        """A logger of torchtitan's own failed, which costs its values and not the training."""
        if self.session.collector is not None:
            self.session.collector.record_event(self.step, "tracker_failed", "warn", detail=detail)

    def _tokens_after_this_step(self) -> int:
        """Training tokens of all ranks up to and including this step; every rank sees equally many."""
        training = self.config.training
        own = self.gradient_accumulation_steps * training.local_batch_size * training.seq_len
        return int((self.ntokens_seen + own) * self._scale.num_ranks)

    def _learning_rate(self) -> float | None:
        """The rate of this step where every parameter group has the same; else None: there is no one rate."""
        rates = set(self.lr_schedulers.get_metrics().values())
        return rates.pop() if len(rates) == 1 else None

    # -- attempts, checkpoints, end ---------------------------------------------------------------------------

    def _begin_attempt(self) -> None:
        """Claim the attempt in the first step of this process, where the restored step is known."""
        restored = self.step - 1
        self.session.begin_attempt(
            first_step=restored + 1,
            parent_run_id=self._loaded.get(_RUN_ID),
            parent_attempt=self._loaded.get(_ATTEMPT),
        )
        if self.config.loopscope.compile_reductions and self.session.config.trace_every:
            self._compile_reductions()
        if self._probe is not None and restored:
            self._probe.restart(restored)
        elif self._probe is not None and self.session.is_probe_step(0, self.config.training.steps):
            self._probe.run(0)

    def _compile_reductions(self) -> None:
        shape = (self.config.training.local_batch_size, self.config.training.seq_len)
        tokens_BS = torch.zeros(shape, dtype=torch.int64, device=self.device)
        done = compile_reductions(self.model, tokens_BS, self.train_context)
        if done is not None and self.session.collector is not None:
            detail = f"{done.compiled} reductions compiled in {done.seconds:.1f} s, {len(done.failed)} failed"
            self.session.collector.record_event(self.step, "warm_up", "info", detail=detail)

    def state_dict(self) -> dict[str, Any]:
        """torchtitan's trainer state, and whose run and attempt it belongs to."""
        # A checkpoint is being written: its rows must not be younger on disk than it is.
        self.session.flush(durable=True)
        return {**super().state_dict(), _RUN_ID: self.session.run_id, _ATTEMPT: self.session.attempt or 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore torchtitan's state; remember which run and attempt wrote the checkpoint."""
        super().load_state_dict(state_dict)
        self._loaded = {key: state_dict[key] for key in (_RUN_ID, _ATTEMPT) if key in state_dict}

    def close(self) -> None:
        """Write and seal what is left of the rows, then close torchtitan's parts."""
        try:
            if self._observer is not None:
                self._observer.remove()
            # First, since the last values and alerts still go to the W&B run that torchtitan ends.
            self.session.close()
        finally:
            super().close()

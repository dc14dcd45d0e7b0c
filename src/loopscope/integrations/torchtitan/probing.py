"""The probe of a torchtitan run: the fixed corpus through the model, on every rank alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopscope.probe import EncodedCorpus, load_corpus
from loopscope.trace import run_probe_forward

if TYPE_CHECKING:
    from loopscope.integrations.torchtitan.trainer import LoopscopeTrainer


class TrainerProbe:
    """Runs the corpus of a trainer. Collective: every rank calls `run` at the same steps."""

    def __init__(self, trainer: LoopscopeTrainer, corpus: EncodedCorpus, batch_size: int) -> None:
        self._trainer = trainer
        self._ids = torch.from_numpy(corpus.input_ids.copy()).to(trainer.device)
        self._batch_size = batch_size
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
        """Probe the parameters as they are after update `step`; returns headline scalars."""
        collector = self._trainer.session.collector
        assert collector is not None
        return run_probe_forward(
            self._trainer.model,
            self._ids,
            collector=collector,
            step=step,
            context=self._trainer.train_context,
            batch_size=self._batch_size,
        )

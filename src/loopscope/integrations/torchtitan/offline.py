"""Probes of finished checkpoints: the same functions as online, into a run of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from loopscope.analysis import open_run
from loopscope.errors import CheckpointMismatchError, ConfigError, ProbeError
from loopscope.integrations.torchtitan.offline_checkpoint import (
    CheckpointSource,
    Legacy,
    step_of,
    training_of,
)
from loopscope.probe import EncodedCorpus, load_corpus
from loopscope.probe.deep import DeepSettings, chosen_experts, run_deep_probe
from loopscope.probe.deep_routing import Chosen
from loopscope.session import Loopscope
from loopscope.store.redact import redact
from loopscope.trace import run_probe_forward

_DONE = "offline_probe_done"
"""The event that follows the last row of a checkpoint: without it, its rows may be cut short."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineSettings:
    """How checkpoints are probed."""

    corpus: str = "core"
    """Name of a corpus that comes with loopscope, or the path of one."""
    seq_len: int | None = None
    """Tokens per document at most; None takes the run's own probes'."""
    batch_size: int | None = None
    """Documents per forward; None takes the run's own probes'."""
    dtype: Literal["run", "fp32"] = "run"
    """Parameters as in the training's forwards, or in float32."""
    deep: DeepSettings | None = None
    """Also run the deep probe."""
    run: Path | None = None
    """The run that wrote the checkpoints; None looks for it above them."""
    tokenizer: Path | None = None
    """Folder of the run's tokenizer, where it is not where the run says."""
    legacy: Legacy | None = None
    """Old checkpoints that no run's description fits."""

    def source_of(self, checkpoint: Path) -> CheckpointSource:
        """Where the checkpoint's model comes from."""
        return self.legacy or training_of(checkpoint, self.run, self.tokenizer)

    @property
    def param_dtype(self) -> torch.dtype | None:
        """None: as in the training."""
        return torch.float32 if self.dtype == "fp32" else None


def encode_for(source: CheckpointSource, settings: OfflineSettings) -> EncodedCorpus:
    """The corpus under the run's tokenizer.

    Raises:
        ConfigError: there is no such corpus, or a longer sequence is asked for than the model's context.
        ProbeError: a document or the vocabulary does not fit, or the tokens are not those of the run's own probes.
    """
    seq_len = source.seq_len if settings.seq_len is None else settings.seq_len
    if source.context is not None and seq_len > source.context:
        raise ConfigError(
            f"--seq-len is {seq_len}, longer than the model's context of {source.context} tokens; expected "
            "at most that"
        )
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(source.tokenizer_path))
    corpus = load_corpus(settings.corpus).encode(tokenizer.encode, seq_len)
    if source.vocab_size is not None:
        corpus.check_vocabulary(source.vocab_size)
    own = source.corpora.get(corpus.name, corpus.corpus_hash)
    if settings.seq_len is None and own != corpus.corpus_hash:
        raise ProbeError(
            f"corpus {corpus.name!r} has corpus_hash {corpus.corpus_hash} under the tokenizer {source.tokenizer_path}, "
            f"but {own} in the run's own probes; expected the same tokens. Name the run's tokenizer with --tokenizer, "
            "or a length with --seq-len where the tokens are meant to differ."
        )
    return corpus


def probe_checkpoints(
    checkpoints: Sequence[Path],
    out: Path,
    settings: OfflineSettings,
    *,
    progress: Callable[[int], None] = lambda step: None,
) -> list[int]:
    """Probe checkpoints in order of their steps; those whose rows `out` holds already are skipped.

    Rows go to a run of their own in `out`, at the checkpoint's step. Killed in between, the next call goes on.

    Args:
        checkpoints: complete step-N folders of one run.
        out: folder of the run for the rows.
        settings: how.
        progress: called with every step that is done.

    Returns:
        The steps that were probed now.

    Raises:
        ProbeError: a checkpoint is incomplete (named), or of another architecture.
        CheckpointMismatchError: `out` holds probes of something else.
        ConfigError: `out` holds probes of later steps that are not among `checkpoints`.
    """
    ordered = sorted(checkpoints, key=step_of)
    training = settings.source_of(ordered[0])
    for checkpoint in ordered:
        training.check(checkpoint)
    corpus = encode_for(training, settings)
    source: dict[str, object] = {
        "run_id": training.run_id,
        "corpus_hash": corpus.corpus_hash,
        "dtype": settings.dtype,
        "deep": None if settings.deep is None else settings.deep.shuffle_scope,
    }
    resume = (out / "run.json").is_file()
    done, parent = _done(out, source) if resume else (set(), None)
    if not (missing := [step_of(path) for path in ordered if step_of(path) not in done]):
        return []
    # A later attempt replaces every step from its first on, so what follows a gap is probed again.
    if lost := sorted(step for step in done.difference(map(step_of, ordered)) if step > missing[0]):
        raise ConfigError(
            f"{out} holds probes of the later steps {lost}, which those of step {missing[0]} would replace: rows are "
            "added in the order of their steps. Probe all of them with --series, or name another folder with --out."
        )
    first_todo = list(map(step_of, ordered)).index(missing[0])
    earlier, todo = ordered[:first_todo], ordered[first_todo:]
    config = Loopscope.Config(out=out, run_name=f"probes of {training.run.name}", resume=resume)
    first = training.load(todo[0], settings.param_dtype)
    with Loopscope(config) as scope:
        scope.open(
            expected_visits=first.expected_visits(),  # type: ignore[operator]  # nn.Module types it as a tensor
            # Old code learns its depth in a forward, after the manifest was written.
            meta=None if settings.legacy else first.trace_meta(),  # type: ignore[operator]
            configuration={"offline": source},
        )
        scope.use_corpus(corpus)
        scope.begin_attempt(
            first_step=missing[0], parent_run_id=scope.run_id if resume else None, parent_attempt=parent
        )
        before = _chosen_before(earlier, training, corpus, settings)
        for number, checkpoint in enumerate(todo):
            model = training.load(checkpoint, settings.param_dtype) if number else first
            step = step_of(checkpoint)
            before = _probe(model, scope, step, corpus, settings, training, before)
            assert scope.collector is not None
            scope.collector.record_event(step, _DONE, "info")
            scope.flush(durable=True)
            progress(step)
    return [step_of(path) for path in todo]


def _probe(
    model: nn.Module,
    scope: Loopscope,
    step: int,
    corpus: EncodedCorpus,
    settings: OfflineSettings,
    training: CheckpointSource,
    before: tuple[int, Chosen] | None,
) -> tuple[int, Chosen] | None:
    collector = scope.collector
    assert collector is not None
    batch_size = settings.batch_size or training.batch_size
    ids = torch.from_numpy(corpus.input_ids.copy()).to(next(model.parameters()).device)
    scope.begin_step(step)
    run_probe_forward(model, ids, collector=collector, step=step, batch_size=batch_size)
    if settings.deep is None:
        return None
    result = run_deep_probe(model, corpus, settings.deep, batch_size=batch_size, before=before)
    result.record(collector, step)
    return step, result.chosen


def _chosen_before(
    earlier: Sequence[Path], training: CheckpointSource, corpus: EncodedCorpus, settings: OfflineSettings
) -> tuple[int, Chosen] | None:
    """What the last checkpoint that was done before chose: going on gives the rows of never having stopped."""
    if settings.deep is None or not earlier:
        return None
    model = training.load(earlier[-1], settings.param_dtype)
    chosen = chosen_experts(model, corpus, batch_size=settings.batch_size or training.batch_size)
    return step_of(earlier[-1]), chosen


def _done(out: Path, source: dict[str, object]) -> tuple[set[int], int | None]:
    """Steps that `out` holds all rows of, and its last attempt; None where it was cut off before its first."""
    run = open_run(out)
    if (known := run.manifest.configuration.get("trainer", {}).get("offline")) != redact(source).value:
        raise CheckpointMismatchError(
            f"{out} holds a run about {known}, expected probes of {source}. Name another folder with --out."
        )
    # Rows of its first probe say little: the deep probe, which takes longer, writes its own after them.
    rows = run.sql(f"select distinct step from health where event = '{_DONE}'").fetchall()
    return {step for (step,) in rows}, max((one.attempt for one in run.attempts), default=None)

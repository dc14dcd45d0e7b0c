"""`loopscope probe`: what finished checkpoints do on a fixed corpus, and what changed between two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from loopscope.catalog.rows import VISIT, visit_labels
from loopscope.cli.console import MISSING, make_console, make_table, step_progress
from loopscope.cli.flags import check_least
from loopscope.errors import ConfigError, ProbeError

if TYPE_CHECKING:
    from loopscope.integrations.torchtitan.offline import OfflineSettings
    from loopscope.integrations.torchtitan.offline_compare import Comparison, VisitChange
    from loopscope.metrics.probe.compare import Interval


_WIDTH = 130
"""Of the table of a comparison: an interval that is folded over several lines is hard to read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Probe finished torchtitan checkpoints of the loopmoe model.

    loopscope probe CHECKPOINT --out RUN probes one; --series DIR all that a run left, going on where an earlier
    call stopped; --compare A B prints what changed between two, and by how much.
    """

    checkpoint: Annotated[Path | None, tyro.conf.Positional] = None
    """A step-N folder."""
    series: Path | None = None
    """A run's folder, or one that holds step-N folders: probe all of them."""
    compare: tuple[Path, Path] | None = None
    """Two step-N folders to compare; nothing is written."""
    out: Path | None = None
    """Folder of the run that the rows go to. For --series the default is offline-probe-CORPUS in the run's own."""
    corpus: str = "core"
    """Name of a corpus that comes with loopscope, or the folder of one."""
    run_dir: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """The run that wrote the checkpoints; default: looked for above them."""
    seq_len: int | None = None
    """Tokens per document at most; default: as in the run's own probes."""
    batch_size: int | None = None
    """Documents per forward; default: as in the run's own probes."""
    dtype: Literal["run", "fp32"] = "run"
    """Parameters as in the training's forwards, or in float32, which the perturbation needs."""
    deep: Literal["no", "batch", "document"] = "no"
    """Also run the deep probe, its null shuffled over all tokens (batch) or within each document."""

    legacy: str | None = None
    """Old checkpoints without head and tail: MODULE:FUNCTION or FILE.py:FUNCTION of their own code, which takes
    the checkpoint's path and returns the model. Needs --layers, --tokenizer and --seq-len."""
    layers: int | None = None
    """With --legacy: L, the physical layers of the stack."""
    tokenizer: Path | None = None
    """Folder of the tokenizer; default: where the run says."""

    def run(self) -> int:
        """0 when done, 1 where a checkpoint was refused.

        Raises:
            ConfigError: the question was wrong.
            ProbeError: a checkpoint is incomplete or of another architecture.
        """
        if [self.checkpoint, self.series, self.compare].count(None) != 2:
            raise ConfigError("expected one of CHECKPOINT, --series DIR and --compare A B")
        check_least(self, seq_len=2, batch_size=1)
        from loopscope.models import cpu_compat

        cpu_compat.enable()
        if self.compare is None:
            return self._probe()
        from loopscope.integrations.torchtitan.offline_compare import compare_checkpoints

        _show(compare_checkpoints(*self.compare, self._settings()), *self.compare)
        return 0

    def _settings(self) -> OfflineSettings:
        from loopscope.integrations.torchtitan.offline import OfflineSettings
        from loopscope.integrations.torchtitan.offline_checkpoint import Legacy
        from loopscope.probe.deep import DeepSettings

        legacy = None
        if self.legacy is not None:
            if self.layers is None or self.tokenizer is None or self.seq_len is None:
                raise ConfigError(
                    "--legacy needs --layers, --tokenizer and --seq-len, which no run.json tells"
                )
            legacy = Legacy(
                code=self.legacy,
                num_layers_in_stack=self.layers,
                tokenizer_path=self.tokenizer,
                seq_len=self.seq_len,
            )
        return OfflineSettings(
            corpus=self.corpus,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            dtype=self.dtype,
            deep=None if self.deep == "no" else DeepSettings(shuffle_scope=self.deep),
            run=self.run_dir,
            tokenizer=self.tokenizer,
            legacy=legacy,
        )

    def _probe(self) -> int:
        from loopscope.integrations.torchtitan.offline import probe_checkpoints
        from loopscope.integrations.torchtitan.offline_checkpoint import find_checkpoints

        console, settings = make_console(stderr=True), self._settings()
        refused = 0
        if self.checkpoint is not None:
            if self.out is None:
                raise ConfigError("--out is missing, expected the folder of the run that the rows go to")
            whole, out = [self.checkpoint], self.out
        else:
            assert self.series is not None
            whole = []
            for path in find_checkpoints(self.series):
                try:
                    settings.source_of(path).check(path)
                    whole.append(path)
                except ProbeError as error:
                    refused += 1
                    console.print(f"refused: {error}", markup=False)
            if not whole:
                return 1
            if self.out is None and settings.legacy is not None:
                raise ConfigError("--out is missing, expected the folder of the run that the rows go to")
            out = self.out or settings.source_of(whole[0]).run / f"offline-probe-{Path(self.corpus).name}"
        with step_progress(console) as progress:
            bar = progress.add_task("probing", total=len(whole))
            steps = probe_checkpoints(whole, out, settings, progress=lambda step: progress.advance(bar))
        skipped = len(whole) - len(steps)
        print(f"probed {len(steps)} checkpoint(s), {skipped} were done before, {refused} refused\n{out}")
        return 1 if refused else 0


def _show(found: Comparison, first: Path, second: Path) -> None:
    from loopscope.metrics.probe.compare import MIN_DOCUMENTS

    console = make_console()
    console.width = max(console.width, _WIDTH)
    labels = visit_labels({name: [getattr(change.visit, name) for change in found.visits] for name in VISIT})
    rows = [
        (
            change.visit.unrolled_pos,
            label,
            *(_cell(one) for one in (change.choice, change.entropy, change.norm)),
            _reading(change),
        )
        for label, change in zip(labels, found.visits, strict=True)
    ]
    columns = ["pos", "visit", "choice changed", "entropy, nats", "norm, relative", "reading"]
    together = (
        f"; mean [interval, documents resampled]; the table's {found.num_intervals} intervals hold together with 95%"
        if found.num_intervals
        else ""
    )
    console.print(
        f"{first} → {second}\n"
        f"corpus {found.corpus_name} {found.corpus_hash[:12]}, {found.num_documents} documents{together}",
        markup=False,
    )
    console.print(make_table(columns, rows, left=["visit", "reading"]))
    console.print(f"loss, nats per token: {_cell(found.loss)}  {_reading(found.loss)}", markup=False)
    if found.num_documents < MIN_DOCUMENTS:
        console.print(
            f"{found.num_documents} document(s) give no interval, expected {MIN_DOCUMENTS} at least: take another "
            "--corpus",
            markup=False,
        )


def _cell(interval: Interval | None) -> str:
    if interval is None:
        return MISSING
    if not math.isfinite(interval.mean):
        return "not finite"
    bounds = f"[{interval.low:.2g}, {interval.high:.2g}]" if interval.known else "(no interval)"
    return f"{interval.mean:.2g} {bounds}"


def _reading(found: Interval | VisitChange) -> str:
    return "changed" if found.meaningful else "no meaningful difference" if found.known else "not known"

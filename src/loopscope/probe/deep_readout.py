"""Readouts after every pass through the loop → rows of probe_readout."""

import math
from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from loopscope.metrics.probe.readout import Settling, readout_sums
from loopscope.probe.deep_routing import Row
from loopscope.probe.deep_rows import with_null_reasons


@dataclass(slots=True)
class _Step:
    loss: float = 0.0
    entropy: float = 0.0
    kl: float | None = None
    tokens: int = 0
    targets: int = 0
    settled: int = 0


class Readouts:
    """Sums over the documents read out so far; of the logits it keeps those of one step, for the next."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, _Step] = defaultdict(_Step)
        self._before: Tensor | None = None
        self._settling: Settling | None = None

    def add(self, loop_step: int, logits_BSV: Tensor, ids_BS: Tensor) -> None:
        """Add the readout after `loop_step` of the next documents; steps come in order, from 0."""
        before_BSV = self._before if loop_step else None
        if self._settling is None:
            self._settling = Settling(ids_BS.numel(), logits_BSV.device)
        step = self._steps[loop_step]
        for row, (logits_SV, ids_S) in enumerate(zip(logits_BSV, ids_BS, strict=True)):
            sums = readout_sums(logits_SV, None if before_BSV is None else before_BSV[row], ids_S)
            step.loss += float(sums.loss)
            step.entropy += float(sums.entropy)
            step.kl = None if sums.kl is None else (step.kl or 0.0) + float(sums.kl)
        step.tokens += ids_BS.numel()
        step.targets += ids_BS.shape[0] * (ids_BS.shape[1] - 1)
        self._settling.add(logits_BSV.argmax(-1).flatten())
        self._before = logits_BSV

    def end_documents(self) -> None:
        """Let the logits of these documents go, and count where they settled."""
        if self._settling is not None:
            for (_, step), count in zip(sorted(self._steps.items()), self._settling.counts(), strict=True):
                step.settled += count
        self._before = self._settling = None

    def rows(self, readout: str) -> list[Row]:
        """A row per loop step."""
        rows: list[Row] = []
        entropy_before: float | None = None
        for loop_step, step in sorted(self._steps.items()):
            entropy = step.entropy / step.tokens
            settled = step.settled / step.tokens if math.isfinite(entropy) else math.nan
            values: Row = {
                "loss_mean": step.loss / step.targets,
                "loss_sum": step.loss,
                "kl_from_previous": None if step.kl is None else step.kl / step.tokens,
                "entropy_mean": entropy,
                "entropy_change": None if entropy_before is None else entropy - entropy_before,
                # At the last step there is no later one to agree with.
                # The arg-max of logits with a NaN is that NaN's place, which settles at once.
                "argmax_settled": None if loop_step == max(self._steps) else settled,
            }
            rows.append(
                {
                    "readout": readout,
                    "loop_step": loop_step,
                    "num_loop_steps": len(self._steps),
                    "num_tokens": step.tokens,
                    "num_target_tokens": step.targets,
                    **with_null_reasons(values),
                }
            )
            entropy_before = entropy
        return rows

"""Ranks in one process: the others exchange first, the writer last, and only the writer sees everything."""

from __future__ import annotations

import torch
from collect_helpers import specs

from loopscope import ParquetCollector
from loopscope.collect import MemoryWriter, ProbeCorpus, RowContext


class _Done:
    def wait(self):
        return None

    def is_completed(self):
        return True


class InTurn:
    """A `RankReducer` for ranks that are called one after the other, the writer last."""

    def __init__(self, shared, rank, num_ranks):
        self.device = torch.device("cpu")
        self.num_ranks = num_ranks
        self.is_writer = rank == 0
        self.calls = []
        self._shared = shared

    def sum(self, buffer):
        self._reduce("sum", buffer, torch.add)

    def max(self, buffer):
        self._reduce("max", buffer, torch.maximum)

    def start_sum(self, buffer):
        self._reduce("start_sum", buffer, torch.add)
        return _Done()

    def _reduce(self, name, buffer, merge):
        assert buffer.dtype == torch.float64
        assert buffer.isfinite().all() or name == "start_sum"
        self.calls.append((name, buffer.numel()))
        waiting = self._shared.setdefault(name, [])
        if not self.is_writer:
            waiting.append(buffer.clone())
            return
        assert len(waiting) == self.num_ranks - 1
        for other in waiting:
            buffer.copy_(merge(buffer, other))
        waiting.clear()


def ranks(num_ranks, *, on_error="record", visits=None, per_rank=False):
    """(writer, collectors by rank, reducers by rank)."""
    shared, writer = {}, MemoryWriter()
    reducers = [InTurn(shared, rank, num_ranks) for rank in range(num_ranks)]
    made = [
        ParquetCollector(
            writer,
            context=RowContext(run_id="r", rank=rank, world_size=num_ranks),
            expected_visits=specs() if visits is None else visits,
            on_error=on_error,
            corpus=ProbeCorpus(name="tiny", hash="abc"),
            reducer=reducers[rank],
            per_rank=per_rank,
        )
        for rank in range(num_ranks)
    ]
    return writer, made, reducers

"""Tensors that a deep probe spills to a temporary file, so that its memory does not grow with the loop's depth."""

import tempfile
import weakref
from typing import IO, NamedTuple

import torch
from torch import Tensor

from loopscope.errors import ProbeError
from loopscope.trace import TracePoint


class Stored(NamedTuple):
    """Location of a tensor in its file."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class SpillFile:
    """Tensors in an unnamed temporary file, removed with this object or with the process.

    The file is made with the first tensor, where Python's `tempfile` puts one (`TMPDIR`).
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0

    def put(self, tensor: Tensor) -> Stored:
        """Write a copy of the bytes of `tensor`.

        Raises:
            ProbeError: the file cannot be made or has no more room.
        """
        raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        stored = Stored(self._end, raw.nbytes, tuple(tensor.shape), tensor.dtype, tensor.device)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="loopscope-probe-")  # noqa: SIM115 (closed with self)
                weakref.finalize(self, self._file.close)
            self._file.seek(self._end)
            self._file.write(raw.data)
            self._file.flush()
        except OSError as error:
            raise ProbeError(
                f"the deep probe cannot write {raw.nbytes} bytes to {tempfile.gettempdir()} "
                f"({error.strerror or error}); expected room for a temporary file. Make some, or point TMPDIR to "
                "another folder."
            ) from None
        self._end += raw.nbytes
        return stored

    def get(self, stored: Stored) -> Tensor:
        """The tensor again, on the device that it came from."""
        if not stored.num_bytes:
            return torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
        assert self._file is not None
        raw = bytearray(stored.num_bytes)
        self._file.seek(stored.offset)
        # A binary file has it.
        if (read := self._file.readinto(raw)) != stored.num_bytes:  # type: ignore[attr-defined]
            raise ProbeError(
                f"the deep probe's temporary file gave {read} bytes, expected {stored.num_bytes}. Something cut it."
            )
        return torch.frombuffer(raw, dtype=stored.dtype).reshape(stored.shape).to(stored.device)

    def clear(self) -> None:
        """Forget everything; the room is used again."""
        self._end = 0


class CleanVisits:
    """Of a clean forward what readouts and disturbed forwards are held against: states and chosen experts."""

    def __init__(self) -> None:
        self._spill = SpillFile()
        self._residual: dict[int, Stored] = {}
        self._idx: dict[int, Stored] = {}

    def __contains__(self, position: int) -> bool:
        return position in self._residual

    def __len__(self) -> int:
        return len(self._residual)

    def add(self, point: TracePoint) -> None:
        """Spill a visit."""
        self._residual[point.unrolled_pos] = self._spill.put(point.residual)
        if point.topk_idx is not None:
            self._idx[point.unrolled_pos] = self._spill.put(point.topk_idx)

    def residual(self, position: int) -> Tensor:
        """The hidden state after the visit [B, S, d]."""
        return self._spill.get(self._residual[position])

    def topk_idx(self, position: int) -> Tensor | None:
        """Its chosen experts [B, S, k]; None for a dense layer."""
        stored = self._idx.get(position)
        return None if stored is None else self._spill.get(stored)

    def clear(self) -> None:
        """Other documents follow."""
        self._residual.clear()
        self._idx.clear()
        self._spill.clear()

"""Tensors that are put aside come back bit for bit, room is used again, and a full disk says so."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopscope.errors import ProbeError
from loopscope.probe.deep_spill import CleanVisits, SpillFile

DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.float64, torch.uint8, torch.bool)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES), st.integers(0, 99)),
        min_size=1,
        max_size=6,
    )
)
def test_what_was_put_comes_back_in_any_order(wanted):
    spill, kept = SpillFile(), []
    for shape, dtype, seed in wanted:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        tensor = drawn.transpose(0, -1) if drawn.ndim > 1 else drawn  # not contiguous
        kept.append((tensor, spill.put(tensor)))
    for tensor, stored in reversed(kept):
        found = spill.get(stored)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        # By bytes: a NaN equals itself here.
        assert found.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_a_copy_is_kept():
    spill, tensor = SpillFile(), torch.zeros(3)
    stored = spill.put(tensor)
    tensor.add_(1)
    spill.get(stored).add_(7)
    assert spill.get(stored).tolist() == [0, 0, 0]


def test_cleared_room_is_used_again():
    spill = SpillFile()
    first = spill.put(torch.zeros(5))
    spill.clear()
    assert spill.put(torch.ones(5)).offset == first.offset


def test_the_file_is_closed_with_its_owner(monkeypatch):
    made = []
    fresh = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **how: made.append(fresh(**how)) or made[-1])
    spill = SpillFile()
    assert made == []  # nothing is made before it is needed
    spill.put(torch.zeros(3))
    del spill
    gc.collect()
    assert made[0].closed


def test_a_file_that_cannot_be_made(monkeypatch):
    def refuse(**_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ProbeError, match=r"cannot write 12 bytes to .* \(No space left on device\).*TMPDIR"):
        SpillFile().put(torch.zeros(3))


def test_a_file_that_was_cut():
    spill = SpillFile()
    stored = spill.put(torch.zeros(3))
    spill._file.truncate(4)
    with pytest.raises(ProbeError, match="gave 4 bytes, expected 12"):
        spill.get(stored)


def test_visits_of_other_documents_are_forgotten():
    from loopscope.trace import TracePoint

    visits = CleanVisits()
    idx = torch.zeros(1, 2, 2, dtype=torch.int64)
    visits.add(
        TracePoint(
            block="loop",
            unrolled_pos=3,
            loop_step=1,
            layer_idx=0,
            num_experts=4,
            top_k=2,
            router_logits=torch.zeros(1, 2, 4),
            router_probs=torch.full((1, 2, 4), 0.25),
            topk_idx=idx,
            topk_weights=torch.full((1, 2, 2), 0.5),
            residual=torch.ones(1, 2, 5),
        )
    )
    assert 3 in visits
    assert torch.equal(visits.topk_idx(3), idx)
    assert visits.residual(3).shape == (1, 2, 5)
    visits.clear()
    assert 3 not in visits
    assert len(visits) == 0
    assert visits.topk_idx(3) is None

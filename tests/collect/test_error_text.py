import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loopscope.collect.error_text import describe


def _fail_holding(tensor):
    local = tensor.view(-1)
    raise ValueError(f"bad value in {local.numel()} entries")


def test_text_names_type_message_and_place():
    with pytest.raises(ValueError) as caught:
        _fail_holding(torch.zeros(3))
    text = describe(caught.value)
    assert text.startswith("ValueError: bad value in 3 entries (at test_error_text.py:")
    assert text.endswith("in _fail_holding)")


def test_a_kept_exception_no_longer_keeps_tensors():
    tensor = torch.zeros(3)
    alive = StorageWeakRef(tensor.untyped_storage())
    kept = []

    def run(value):
        try:
            try:
                _fail_holding(value)
            except ValueError as inner:
                raise RuntimeError("outer") from inner
        except RuntimeError as error:
            kept.append(error)
            describe(error)

    run(tensor)
    del tensor
    gc.disable()
    try:
        assert alive.expired()
    finally:
        gc.enable()


def test_long_messages_are_cut():
    assert len(describe(ValueError("x" * 100_000))) == 2000

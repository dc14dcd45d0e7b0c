"""The quick version of the fault suite; `scripts/bench faults` runs the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_bytes import flip_bits, flip_documents, truncate_journal, truncate_parts
from fault_injection import run_injection
from fault_kill import run_kills


@pytest.mark.filterwarnings("ignore")
def test_no_disk_error_leaves_the_store_and_every_row_is_accounted_for(fast_tmp: Path) -> None:
    figures = run_injection(fast_tmp, stride=83)
    assert figures["exceptions"] == 0, figures["examples"]
    assert figures["unaccounted"] == 0, figures["examples"]
    assert figures["wrong"] == 0
    assert figures["unreported"] == 0
    assert figures["dropped"] > 0


def test_a_truncated_journal_loses_one_record_at_most(fast_tmp: Path) -> None:
    figures = truncate_journal(fast_tmp, steps=4, stride=13)
    assert figures["offsets"] > 100
    assert (figures["unreadable"], figures["worst_loss"], figures["wrong"]) == (0, 1, 0)


def test_a_truncated_part_is_named_and_its_rows_are_counted(fast_tmp: Path) -> None:
    figures = truncate_parts(fast_tmp, steps=6, cuts=8, seed=1)
    assert (figures["unnamed"], figures["uncounted"]) == (0, 0)


def test_no_flipped_bit_is_silently_wrong(fast_tmp: Path) -> None:
    figures = flip_bits(fast_tmp, steps=6, flips=200, seed=2)
    assert figures["flips"] == 200
    assert (figures["unreadable"], figures["silently_wrong"], figures["missing_unnamed"]) == (0, 0, 0)


def test_no_flipped_bit_of_what_describes_the_rows_is_silently_wrong(fast_tmp: Path) -> None:
    """Every byte of run.json, of the attempts and of what counts the parts."""
    figures = flip_documents(fast_tmp, bits=(1,))
    assert figures["flips"] > 2000
    assert (figures["unreadable"], figures["silently_wrong"], figures["wrong"]) == (0, 0, 0)


def test_kill_9_loses_and_doubles_nothing(fast_tmp: Path) -> None:
    figures = run_kills(fast_tmp, cycles=12, seed=3)
    assert figures["killed"] >= 5
    assert figures["acknowledged"] > 50
    assert (figures["lost"], figures["doubled"], figures["wrong"], figures["unreadable"]) == (0, 0, 0, 0)
    assert (figures["problems"], figures["not_well"]) == (0, 0)

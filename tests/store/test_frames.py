from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscope.store.journal.frames import HEAD_SIZE, MARKER, MAX_PAYLOAD, Frame, Gap, encode_frame, scan

# Payloads that hold the marker, and whole frames, are the ones that could fool the search for the next frame.
payloads = st.lists(
    st.one_of(
        st.binary(max_size=40), st.just(MARKER), st.binary(max_size=9).map(lambda b: encode_frame(0, b))
    ),
    max_size=12,
)


def pack(contents: list[bytes]) -> bytes:
    return b"".join(encode_frame(i, p) for i, p in enumerate(contents))


@given(payloads)
def test_what_goes_in_comes_out(contents: list[bytes]) -> None:
    pieces = list(scan(pack(contents)))
    assert [(p.ordinal, p.payload) for p in pieces if isinstance(p, Frame)] == list(enumerate(contents))
    assert len(pieces) == len(contents)


@given(payloads, st.integers(0, 1000))
def test_a_cut_file_keeps_every_whole_frame(contents: list[bytes], size: int) -> None:
    data = pack(contents)[:size]
    pieces = list(scan(data))
    ends = [sum(HEAD_SIZE + len(p) for p in contents[: i + 1]) for i in range(len(contents))]
    whole = sum(end <= len(data) for end in ends)
    assert [p.payload for p in pieces if isinstance(p, Frame)][:whole] == contents[:whole]
    gaps = [p for p in pieces if isinstance(p, Gap)]
    assert len(gaps) <= 1
    if gaps and not any(MARKER in p for p in contents):
        assert gaps[0].torn
        assert gaps[0].end == len(data)


@settings(max_examples=300)
@given(payloads.filter(bool), st.data())
def test_a_flipped_bit_never_changes_a_frame_and_costs_one(
    contents: list[bytes], data: st.DataObject
) -> None:
    packed = bytearray(pack(contents))
    position = data.draw(st.integers(0, len(packed) - 1))
    packed[position] ^= 1 << data.draw(st.integers(0, 7))
    pieces = list(scan(bytes(packed)))
    originals = dict(enumerate(contents))
    found = [p for p in pieces if isinstance(p, Frame) and originals.get(p.ordinal) == p.payload]
    assert len({p.ordinal for p in found}) >= len(contents) - 1
    assert any(isinstance(p, Gap) for p in pieces)


def test_gaps_cover_exactly_what_frames_do_not() -> None:
    data = (
        b"garbage" + encode_frame(0, b"a") + b"\x00" * 5 + encode_frame(2, b"c") + encode_frame(3, b"d")[:-1]
    )
    pieces = list(scan(data))
    assert [type(p) for p in pieces] == [Gap, Frame, Gap, Frame, Gap]
    assert [p.torn for p in pieces if isinstance(p, Gap)] == [False, False, True]
    assert sum(p.end - p.start for p in pieces if isinstance(p, Gap)) + 2 * (HEAD_SIZE + 1) == len(data)


def test_a_record_that_is_too_long_is_refused_before_it_is_written() -> None:
    with pytest.raises(OSError, match="expected at most"):
        encode_frame(0, bytes(MAX_PAYLOAD + 1))


def test_a_damaged_length_of_the_last_frame_is_no_torn_write() -> None:
    whole = encode_frame(0, b"first") + encode_frame(1, b"the last one")
    start = len(encode_frame(0, b"first"))
    for position in range(start, len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            gaps = [piece for piece in scan(bytes(flipped)) if isinstance(piece, Gap)]
            assert gaps, (position, bit)
            assert not any(gap.torn for gap in gaps), (position, bit)
    for size in range(start + 1, len(whole)):
        (gap,) = [piece for piece in scan(whole[:size]) if isinstance(piece, Gap)]
        assert gap.torn, size

"""The text of a run: what is read, how it is cut, and that torchtitan's loader takes it and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.errors import ConfigError, StoreError
from loopscope.integrations.torchtitan.text import (
    DATASET_NAME,
    MIN_VOCAB_SIZE,
    PreparedText,
    prepare_text,
    register_dataset,
)
from loopscope.integrations.torchtitan.text_sources import documents, split_text, stdlib_files, user_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    (text / "deep").mkdir(parents=True)
    (text / "a.txt").write_text("".join(f"line {i} of the first file\n" for i in range(300)))
    (text / "deep" / "b.md").write_text("".join(f"é 日本 {i * i}\n" for i in range(300)), encoding="utf-8")
    (text / ".hidden").write_bytes(b"\xff\xfe")
    return text


@pytest.fixture
def prepared(folder: Path, tmp_path: Path) -> PreparedText:
    return prepare_text(folder, tmp_path / "cache", 320)


@given(st.text(alphabet="ab\n é", max_size=200), st.integers(1, 40))
def test_pieces_join_to_the_text(text: str, max_chars: int) -> None:
    pieces = split_text(text, max_chars)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= max_chars for piece in pieces)


def test_cut_falls_after_a_line_end_where_there_is_one() -> None:
    assert split_text("aaa\nbbb\nccc", 9) == ["aaa\nbbb\n", "ccc"]
    assert split_text("abcdef", 4) == ["abcd", "ef"]


def test_stdlib_is_the_same_list_each_time_and_bounded() -> None:
    first, second = stdlib_files(400_000), stdlib_files(400_000)
    assert [file.name for file in first] == [file.name for file in second]
    assert sum(len(file.text.encode()) for file in first) <= 400_000
    assert len(first) > 5
    parts = {part for file in first for part in Path(file.name).parts}
    assert not parts & {"test", "tests", "site-packages", "idle_test", "encodings"}


def test_stdlib_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no readable"):
        stdlib_files(root=tmp_path)


def test_folder_is_read_whole_without_hidden_files(folder: Path) -> None:
    assert {file.name for file in user_files(folder)} == {"a.txt", "deep/b.md"}


def test_a_short_text_still_feeds_several_ranks(folder: Path) -> None:
    assert len(list(documents(user_files(folder / "a.txt")))) >= 32


def test_vocabulary_and_round_trip(prepared: PreparedText) -> None:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    assert prepared.vocab_size == 320
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(prepared.tokenizer_path))
    assert tokenizer.vocab_size == 320
    text = "def f(x):\n\treturn 'é 日本 \U0001f600'\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    marked = tokenizer.encode("x", add_bos=True, add_eos=True)
    assert (marked[0], marked[-1]) == (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_same_text_is_prepared_once_and_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    first = prepare_text(folder, tmp_path / "one", 320)
    stamp = (first.tokenizer_path / "tokenizer.json").stat().st_mtime_ns
    assert prepare_text(folder, tmp_path / "one", 320) == first
    assert (first.tokenizer_path / "tokenizer.json").stat().st_mtime_ns == stamp
    other = prepare_text(folder, tmp_path / "two", 320)
    assert other.sha256 == first.sha256
    for path in (first.tokenizer_path / "tokenizer.json", first.dataset_path):
        twin = tmp_path / "two" / path.relative_to(tmp_path / "one")
        assert path.read_bytes() == twin.read_bytes()
    assert not list((tmp_path / "one").glob("*.tmp"))


def test_changed_text_or_size_is_another_text(folder: Path, prepared: PreparedText, tmp_path: Path) -> None:
    assert prepare_text(folder, tmp_path / "cache", 321).sha256 != prepared.sha256
    (folder / "a.txt").write_text("x" * 2000)
    assert prepare_text(folder, tmp_path / "cache", 320).sha256 != prepared.sha256


def test_small_text_reports_the_vocabulary_it_filled(tmp_path: Path) -> None:
    text = tmp_path / "few.txt"
    text.write_text("abab " * 100)
    found = prepare_text(text, tmp_path / "cache", 4096)
    assert MIN_VOCAB_SIZE < found.vocab_size < 4096
    manifest = json.loads((found.tokenizer_path.parent / "text.json").read_text())
    assert manifest["vocab_size"] == found.vocab_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "holds 0 characters"),
        (b"too short", "expected at least 256"),
        (b"good text " * 50 + b"\xff\xfe", "not UTF-8 text .byte 500"),
        (b"binary\0" * 100, "NUL bytes"),
    ],
)
def test_bad_text_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        prepare_text(path, tmp_path / "cache", 320)
    assert "expected" in str(error.value)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="0 non-empty file"):
        prepare_text(tmp_path / "nothing", tmp_path / "cache", 320)


def test_unreadable_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match="Permission denied"):
        user_files(folder)


def test_vocabulary_below_the_bytes_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size is 100, expected >= 258"):
        prepare_text(folder, tmp_path / "cache", 100)


def test_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write the prepared text"):
        prepare_text(folder, tmp_path / "file" / "cache", 320)


def _loader(prepared: PreparedText, rank: int, ranks: int):
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    config = HuggingFaceTextDataLoader.Config(dataset=DATASET_NAME, dataset_path=str(prepared.dataset_path))
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(prepared.tokenizer_path))
    return config.build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, seq_len=32, local_batch_size=2
    )


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_loader_resumes_where_it_stopped(prepared: PreparedText, rank: int, ranks: int) -> None:
    register_dataset(DATASET_NAME, prepared.dataset_path)
    register_dataset(DATASET_NAME, prepared.dataset_path)
    loader = _loader(prepared, rank, ranks)
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    state = loader.state_dict()
    expected = [next(batches)[0]["input"] for _ in range(3)]
    resumed = _loader(prepared, rank, ranks)
    resumed.load_state_dict(state)
    again = iter(resumed)
    for batch in expected:
        assert next(again)[0]["input"].equal(batch)


def test_ranks_read_different_text(prepared: PreparedText) -> None:
    register_dataset(DATASET_NAME, prepared.dataset_path)
    first, second = (next(iter(_loader(prepared, rank, 2)))[0]["input"] for rank in (0, 1))
    assert not first.equal(second)


def test_registering_another_name_is_refused(prepared: PreparedText, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already belongs"):
        register_dataset("c4_test", prepared.dataset_path)
    with pytest.raises(ConfigError, match="does not exist"):
        register_dataset(DATASET_NAME, tmp_path / "none.arrow")

"""run.json and the other documents know when they were changed; a lost run.json is put together from the rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_runs import QUIET, change_manifest, loss, write_attempt

from loopscope.cli.seal import Seal
from loopscope.errors import NotARunError, RunExistsError, StoreError
from loopscope.store import RunReader, RunStore, read_manifest
from loopscope.store.checksum import check_checksum, with_checksum
from loopscope.store.read.verify import verify_run
from loopscope.store.seal.seal_run import seal_run

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(min_size=1, max_size=5), JSON, min_size=1, max_size=4), st.booleans(), st.data()
)
def test_every_change_that_still_parses_is_found_or_harmless(
    members: dict[str, Any], pretty: bool, data: st.DataObject
) -> None:
    members.pop("checksum", None)
    members["a"] = 1
    document = with_checksum(json.dumps(members, indent=2 if pretty else None, ensure_ascii=False).encode())
    check_checksum(document)
    assert json.loads(document) == {**members, "checksum": json.loads(document)["checksum"]}
    position = data.draw(st.integers(0, len(document) - 1))
    flipped = bytearray(document)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        check_checksum(bytes(flipped))
        read = json.loads(bytes(flipped))
    except ValueError:
        return
    assert {name: read.get(name) for name in members} == members


@pytest.mark.parametrize("name", ["run.json", "attempts/00001.json", "journal/00001-r0-00001.sealed"])
def test_a_document_without_its_checksum_is_refused_by_name(tmp_path: Path, name: str) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 4))
    path = root / name
    members = json.loads(path.read_text())
    del members["checksum"]
    path.write_text(json.dumps(members))
    (problem,) = verify_run(root).problems
    assert path.name in str(problem)
    assert "does not end in a checksum" in problem.text
    assert 'make `"checksum": "none"` its last member' in problem.text
    path.write_text(json.dumps({**members, "checksum": "none"}))
    assert (verify_run(root).problems, verify_run(root).notes) == ([], [])


@pytest.mark.parametrize("value", ["none at all", "crc32:", "crc32:0123", None, 7])
def test_only_a_checksum_or_none_ends_a_document(value: object) -> None:
    with pytest.raises(ValueError, match="does not end in a checksum"):
        check_checksum(json.dumps({"a": 1, "checksum": value}).encode())
    with pytest.raises(ValueError, match="does not end in a checksum"):
        check_checksum(b'{"checksum": "none", "a": 1}')


def test_a_change_by_hand_is_named_with_the_way_to_make_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 4))
    path = root / "run.json"
    path.write_text(path.read_text().replace('"run_name": "run"', '"run_name": "better"'))
    with pytest.raises(StoreError, match=r'changed by hand.*make `"checksum": "none"` its last member'):
        read_manifest(root)
    reader = RunReader(root)
    assert reader.manifest.rebuilt
    assert [p.kind for p in reader.problems] == ["manifest"]
    path.write_text(re.sub(r'"crc32:[0-9a-f]{8}"', '"none"', path.read_text()))
    assert read_manifest(root).run_name == "better"
    # The next one who writes it signs it again.
    write_attempt(root, range(3, 5), parent=1)
    assert read_manifest(root).run_name == "better"
    assert '"checksum": "crc32:' in path.read_text()


def test_a_newer_versions_members_are_covered(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 4))
    change_manifest(root, invented_later="yes")
    assert read_manifest(root).run_name == "run"
    path = root / "run.json"
    path.write_text(path.read_text().replace('"yes"', '"yet"'))
    with pytest.raises(StoreError, match="CRC-32"):
        read_manifest(root)


def test_a_flipped_ledger_is_named(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 4))
    (path,) = root.glob("journal/*.sealed")
    path.write_text(path.read_text().replace('{"loss":3}', '{"loss":1}'))
    (problem,) = verify_run(root).problems
    assert path.name in str(problem)
    assert RunReader(root).read("loss").num_rows == 3


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut"])
@pytest.mark.parametrize("sealed", [True, False])
def test_seal_puts_run_json_together_so_that_the_run_goes_on(
    tmp_path: Path, damage: str, sealed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 6), seal=sealed)
    run_id = read_manifest(root).run_id
    path = root / "run.json"
    if damage == "missing":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-50] if damage == "cut" else data.replace(b'"format": 2', b'"format": 3'))
    with pytest.raises(StoreError):
        RunStore.open(root)
    assert Seal(path=root).run() == 0
    assert "run.json was put together from the rows" in " ".join(capsys.readouterr().out.split())
    assert (root / "run.json.damaged").exists() == (damage != "missing")
    found = verify_run(root)
    assert (found.problems, [n.kind for n in found.notes]) == ([], ["manifest"])
    write_attempt(root, range(4, 8), parent=1)
    reader = RunReader(root)
    assert reader.manifest.run_id == run_id
    assert reader.read("loss")["step"].to_pylist() == list(range(1, 8))


def test_seal_leaves_the_run_json_of_a_living_owner_alone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with RunStore.create(root, options=QUIET) as store:
        store.writer(attempt=store.claim_attempt(first_step=1)).append("loss", loss(1))
        (root / "run.json").write_text("{")
        report = seal_run(root)
        assert "living process" in report.failures[0]
        assert (root / "run.json").read_text() == "{"
        with pytest.raises(RunExistsError):
            RunStore.create(root)


def test_seal_makes_no_run_of_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(NotARunError):
        seal_run(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]

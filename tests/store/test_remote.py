from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs
from store_runs import loss, wait_for

from loopscope.analysis import open_run
from loopscope.errors import ConfigError, NotARunError
from loopscope.store import Remote, RunStore, StoreOptions
from loopscope.store.mirror.snapshot import SealedFile, Stage, sealed_files, settled
from loopscope.store.names import Segment
from loopscope.store.read.verify import verify_run

OPTIONS = StoreOptions(tick_s=0.01, seal_in="thread", rotate_bytes=3000, retry_s=0.05)


def train(root: Path, remote: Remote, steps: int = 60) -> RunStore:
    store = RunStore.create(root, options=OPTIONS)
    store.mirror_to(remote)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for step in range(1, steps + 1):
        writer.append("loss", loss(step))
        time.sleep(0.002)
    store.close()
    return store


def names(filesystem: fs.FileSystem, base: str) -> list[str]:
    found = filesystem.get_file_info(fs.FileSelector(base, recursive=True, allow_not_found=True))
    return [i.path for i in found if i.type == fs.FileType.File]


def test_a_local_filesystem(tmp_path: Path) -> None:
    remote = Remote.of((tmp_path / "remote run é").as_uri())
    train(tmp_path / "run", remote)
    run = open_run((tmp_path / "remote run é").as_uri())
    assert run.arrow("loss")["step"].to_pylist() == list(range(1, 61))
    assert run.problems == []
    assert not [n for n in names(remote.filesystem, remote.base) if n.endswith((".tmp", ".wal"))]


def test_an_fsspec_filesystem_in_memory(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    store = train(tmp_path / "run", Remote.of("/bucket/one", memory))
    run = open_run("/bucket/one", filesystem=memory)
    assert run.arrow("loss").num_rows == 60
    assert run.run_id == store.run_id
    assert run.problems == []


def test_what_is_no_run_or_no_filesystem_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotARunError):
        open_run(tmp_path.as_uri())
    with pytest.raises(ConfigError, match="nosuch://"):
        open_run("nosuch://bucket/run")


class Failing(fs.FileSystemHandler):  # type: ignore[misc]
    """Passes everything on, and fails the first writes, or takes half of one."""

    def __init__(self, inner: fs.FileSystem, failures: int) -> None:
        self.inner, self.failures = inner, failures

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        if self.failures > 0:
            self.failures -= 1
            if self.failures % 2:
                raise OSError("the network is gone")
            with self.inner.open_output_stream(path) as stream:
                stream.write(b"half")
            raise OSError("the network went in the middle")
        return self.inner.open_output_stream(path, metadata=metadata)

    def get_type_name(self) -> str:
        return "failing"

    def normalize_path(self, path: str) -> str:
        return path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


for _name in (
    "get_file_info", "get_file_info_selector", "create_dir", "delete_dir", "delete_dir_contents",
    "delete_root_dir_contents", "delete_file", "move", "copy_file", "open_input_stream", "open_input_file",
    "open_append_stream",
):  # fmt: skip

    def _forward(self: Failing, *args: Any, _name: str = _name) -> Any:
        if _name == "get_file_info":
            return self.inner.get_file_info(list(args[0]))
        if _name == "get_file_info_selector":
            return self.inner.get_file_info(args[0])
        if _name == "create_dir":
            return self.inner.create_dir(args[0], recursive=args[1])
        return getattr(self.inner, _name)(*args)

    setattr(Failing, _name, _forward)
Failing.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class Growing(Failing):
    """Something arrives once, before its `pause`-th question is answered."""

    def __init__(self, inner: fs.FileSystem, pause: int, arrive: Callable[[], None]) -> None:
        super().__init__(inner, failures=0)
        self.left, self.arrive = pause, arrive

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        self._pause()
        return self.inner.get_file_info(selector)

    def get_file_info(self, paths: list[str]) -> Any:
        self._pause()
        return self.inner.get_file_info(list(paths))

    def _pause(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.arrive()


Growing.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")
def test_a_failed_upload_is_tried_again_counted_and_never_half_visible(tmp_path: Path) -> None:
    base = str(tmp_path / "remote")
    remote = Remote(fs.PyFileSystem(Failing(fs.LocalFileSystem(), failures=5)), base)
    store = RunStore.create(tmp_path / "run", options=OPTIONS)
    store.mirror_to(remote)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for step in range(1, 61):
        writer.append("loss", loss(step))
    # A failure that comes when no writer is left has nobody to write it down.
    wait_for(lambda: writer.attempted > 60)
    store.close()
    assert store.upload_failures == 5
    run = open_run(Path(base))
    assert run.arrow("loss").num_rows == 60
    assert run.problems == []
    events = open_run(tmp_path / "run").arrow("health").to_pylist()
    assert sum(e["count"] for e in events if e["event"] == "upload_failed") >= 1


def test_the_copy_begins_with_the_attempt_and_not_with_the_first_seal(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", options=StoreOptions())
    store.mirror_to(Remote.of((tmp_path / "remote").as_uri()))
    time.sleep(0.1)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    wait_for((tmp_path / "remote" / "run.json").exists)
    assert open_run(tmp_path / "remote").run_id == store.run_id
    writer.append("loss", loss(1))
    store.close()
    assert open_run(tmp_path / "remote").arrow("loss").num_rows == 1


def test_a_reader_of_the_copy_sees_a_whole_run_at_every_moment(tmp_path: Path) -> None:
    base = tmp_path / "remote"
    seen: list[int] = []
    wrong: list[BaseException] = []
    stop = threading.Event()

    def look() -> None:
        try:
            run = open_run(base)
        except NotARunError:
            return
        steps = run.arrow("loss")["step"].to_pylist()
        assert steps == list(range(1, len(steps) + 1))
        assert run.problems == []
        seen.append(len(steps))

    def keep_looking() -> None:
        try:
            while not stop.is_set():
                look()
        except BaseException as error:  # an assertion of a thread would be lost with it
            wrong.append(error)

    thread = threading.Thread(target=keep_looking)
    thread.start()
    train(tmp_path / "run", Remote.of(base.as_uri()), steps=100)
    stop.set()
    thread.join()
    assert wrong == []
    assert seen == sorted(seen)
    look()
    assert seen[-1] == 100


class Watched(Remote):
    """A folder that is looked at after every file that comes up."""

    def __init__(self, base: Path, look: Callable[[], None]) -> None:
        super().__init__(fs.LocalFileSystem(), str(base))
        self.look, self.names = look, []

    def put(self, data: bytes, name: str) -> None:
        super().put(data, name)
        self.names.append(name)
        self.look()


def rolled_back(root: Path, remote: Remote) -> list[SealedFile]:
    """Three attempts of which the last two go back; the copy is kept from before the first one is claimed.

    Returns what was sealed before the first row.
    """
    store = RunStore.create(root, options=OPTIONS)
    store.mirror_to(remote)
    time.sleep(0.05)
    early: list[SealedFile] = []
    for parent, first in ((None, 1), (1, 31), (2, 21)):
        attempt = store.claim_attempt(first_step=first, parent_attempt=parent)
        early = early or sealed_files(root)
        writer = store.writer(attempt=attempt)
        for step in range(first, 61):
            writer.append("loss", loss(step))
            time.sleep(0.001)
        writer.close()
    store.close()
    return early


def test_the_copy_is_right_after_every_single_file(tmp_path: Path) -> None:
    base = tmp_path / "remote"
    wrong: list[object] = []
    looks = 0

    def look() -> None:
        nonlocal looks
        if not (base / "run.json").exists():
            return
        looks += 1
        problems = verify_run(base).problems
        steps = open_run(base).arrow("loss")["step"].to_pylist()
        if problems or len(set(steps)) != len(steps):
            wrong.append((watched.names[-1], problems, steps))

    watched = Watched(base, look)
    rolled_back(tmp_path / "run", watched)
    assert wrong == []
    assert looks > 10
    assert open_run(base).arrow("loss")["step"].to_pylist() == list(range(1, 61))


@pytest.mark.parametrize("part", ["/00002.json", "/part-00001-r0-00002-", "/part-00003-r0-00001-"])
def test_nothing_that_refers_to_a_file_goes_up_before_it_even_when_its_upload_fails(
    tmp_path: Path, part: str
) -> None:
    base = tmp_path / "remote"
    wrong: list[object] = []
    refused: list[str] = []

    class Refusing(Watched):
        def put(self, data: bytes, name: str) -> None:
            if part in f"/{name}" and len(refused) < 3:
                refused.append(name)
                raise OSError("the network is gone")
            super().put(data, name)

    def look() -> None:
        if (base / "run.json").exists() and (problems := verify_run(base).problems):
            wrong.append((watched.names[-1], problems))

    watched = Refusing(base, look)
    rolled_back(tmp_path / "run", watched)
    assert len(refused) == 3
    assert wrong == []
    assert open_run(base).arrow("loss")["step"].to_pylist() == list(range(1, 61))


def test_a_run_that_grows_while_it_is_fetched_is_whole(tmp_path: Path) -> None:
    """All the rest comes up behind the back of a reader, from every file on, before every answer that it gets."""
    early = rolled_back(tmp_path / "run", Remote.of((tmp_path / "remote").as_uri()))
    files = sealed_files(tmp_path / "run")
    assert {f.stage for f in files} == set(Stage) - {Stage.BEGIN}
    for start in range(len(files)):
        for pause in range(1, 6):
            base = str(tmp_path / f"copy-{start}-{pause}")
            plain = Remote(fs.LocalFileSystem(), base)
            for file in [*early, *files[:start]]:
                plain.put(file.content(), file.name)

            def arrive(plain: Remote = plain, start: int = start) -> None:
                for file in files[start:]:
                    plain.put(file.content(), file.name)

            growing = Growing(fs.LocalFileSystem(), pause, arrive)
            fetched = tmp_path / f"fetched-{start}-{pause}"
            Remote(fs.PyFileSystem(growing), base).fetch(fetched)
            assert growing.left <= 0
            assert verify_run(fetched).problems == []


def test_a_listing_that_lacks_an_older_part_is_completed_and_ends_there() -> None:
    def name(table: str, seq: int, writer: str = "r0", attempt: int = 1) -> str:
        return f"tables/{table}/{Segment(attempt, writer, seq).part(7)}"

    first = [name("loss", 2), name("loss", 1, "r1"), "tables/loss/odd.parquet"]
    second = [name("health", 1), name("loss", 1), name("loss", 2), name("loss", 3), name("loss", 1, "r1")]
    second += [name("loss", 2, "r1"), name("loss", 1, attempt=2), "tables/loss/odd.parquet"]
    assert settled(first, second) == [*second[:3], second[4], second[7]]


def test_what_lies_in_a_copy_under_a_wrong_name_is_told(tmp_path: Path) -> None:
    train(tmp_path / "run", Remote.of((tmp_path / "remote").as_uri()))
    (tmp_path / "remote" / "tables" / "loss" / "odd.parquet").write_bytes(b"PAR1")
    run = open_run((tmp_path / "remote").as_uri())
    assert [p.where for p in run.problems] == ["tables/loss/odd.parquet"]
    assert run.arrow("loss").num_rows == 60


def test_a_resumed_run_does_not_bring_up_again_what_is_there(tmp_path: Path) -> None:
    base = tmp_path / "remote"
    train(tmp_path / "run", Remote.of(base.as_uri()))
    watched = Watched(base, lambda: None)
    store = RunStore.open(tmp_path / "run", options=OPTIONS)
    store.mirror_to(watched)
    writer = store.writer(attempt=store.claim_attempt(first_step=61, parent_attempt=1))
    writer.append("loss", loss(61))
    store.close()
    sent = [n for n in watched.names if n.endswith(".parquet") and "part-" in n]
    assert sent, watched.names
    assert all("part-00002-" in n for n in sent)
    assert open_run(base).arrow("loss").num_rows == 61
    assert open_run(base).problems == []


def test_a_copy_that_was_removed_is_uploaded_again_and_noted(tmp_path: Path) -> None:
    base = tmp_path / "remote"
    store = RunStore.create(tmp_path / "run", options=OPTIONS)
    store.mirror_to(Remote.of(base.as_uri()))
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for step in range(1, 201):
        writer.append("loss", loss(step))
    wait_for(lambda: len(list(base.glob("tables/loss/*.parquet"))) > 2)
    uploader = store._mirror.uploader
    assert uploader is not None
    wait_for(lambda: len(uploader._done) == len(sealed_files(tmp_path / "run")))
    shutil.rmtree(base)
    writer.append("loss", loss(201))
    store.close()
    run = open_run(base)
    assert run.arrow("loss")["step"].to_pylist() == list(range(1, 202))
    assert run.problems == []
    (told,) = open_run(tmp_path / "run").arrow("health").to_pylist() or [{"detail": uploader.last_error}]
    assert "was removed, and is uploaded again" in str(told["detail"])


def test_what_a_killed_upload_leaves_lies_in_no_tables_folder(tmp_path: Path) -> None:
    class Dying(Remote):
        def _write(self, target: str, data: bytes) -> None:
            super()._write(target, data[: len(data) // 2])
            raise KeyboardInterrupt

    remote = Dying(fs.LocalFileSystem(), str(tmp_path / "remote"))
    with pytest.raises(KeyboardInterrupt):
        remote.put(b"0123456789", "tables/loss/part-00001-r0-00001-00000000.parquet")
    left = [p.relative_to(tmp_path / "remote").parts[0] for p in tmp_path.rglob("*.tmp")]
    assert left == ["journal"]


def test_s3(tmp_path: Path) -> None:
    server_module = pytest.importorskip("moto.server", reason="moto is not installed (extra 'engines')")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        s3 = fs.S3FileSystem(
            access_key="test", secret_key="test", region="us-east-1", scheme="http",
            endpoint_override=f"{host}:{port}", allow_bucket_creation=True,
        )  # fmt: skip
        s3.create_dir("bucket")
        train(tmp_path / "run", Remote.of("bucket/runs/one", s3))
        run = open_run("bucket/runs/one", filesystem=s3)
        assert run.arrow("loss")["step"].to_pylist() == list(range(1, 61))
        assert run.problems == []
        assert not [n for n in names(s3, "bucket") if n.endswith((".tmp", ".wal"))]
        s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed (extra 'engines')")
        through_fsspec = s3fs.S3FileSystem(key="test", secret="test", endpoint_url=f"http://{host}:{port}")
        assert open_run("bucket/runs/one", filesystem=through_fsspec).arrow("loss").num_rows == 60
    finally:
        server.stop()


def test_a_killed_upload_leaves_nothing_half_visible(tmp_path: Path) -> None:
    source = tmp_path / "part"
    source.write_bytes(bytes(range(256)) * 200_000)
    code = """
import sys
from pathlib import Path
from loopscope.store import Remote
remote = Remote.of(Path(sys.argv[2]).as_uri())
print("ready", flush=True)
for number in range(10_000):
    remote.put(Path(sys.argv[1]).read_bytes(), f"tables/loss/part-{number}.parquet")
"""
    base = tmp_path / "remote"
    for wait in (0.01, 0.05, 0.12):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(source), str(base)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(wait)
            process.kill()
        sizes = {p.stat().st_size for p in base.rglob("*.parquet")}
        assert sizes <= {source.stat().st_size}
        shutil.rmtree(base, ignore_errors=True)

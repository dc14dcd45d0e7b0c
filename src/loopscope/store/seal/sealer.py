"""`python -m loopscope.store.seal.sealer RUN JOURNAL...`: seals journals in a process of its own.

Converting rows to Parquet in a thread of the training process would hold the interpreter's lock for milliseconds
at a time; here it costs the training thread nothing, and a crash of the Parquet library stays here.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from loopscope.errors import StoreError
from loopscope.store.disk import LOCAL_DISK, Disk
from loopscope.store.folder import RunFolder
from loopscope.store.schema import TableSchema
from loopscope.store.seal.attempt_table import refresh_attempt_table
from loopscope.store.seal.seal_journal import try_to_seal
from loopscope.store.tables import TABLES


def seal_all(
    root: Path,
    names: Sequence[str],
    *,
    disk: Disk = LOCAL_DISK,
    tables: Mapping[str, TableSchema] = TABLES,
) -> list[str]:
    """Seal each journal; returns what went wrong, as text. The attempt table is rewritten."""
    failures: list[str] = []
    for name in names:
        if sealed := try_to_seal(root, name, failures, disk=disk, tables=tables):
            failures += sealed.faults
    with contextlib.suppress(OSError, StoreError):
        refresh_attempt_table(root, disk=disk)
    return failures


def start_sealer(folder: RunFolder, names: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the process, which inherits the folder's descriptor. Raises OSError where it cannot be started."""
    if not sys.executable:
        raise OSError("there is no interpreter to start")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-m", "loopscope.store.seal.sealer", str(folder.pinned), *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        pass_fds=(folder.fd,),
        start_new_session=True,
    )


def _give_way() -> None:
    """Take only processor time that the training leaves idle."""
    with contextlib.suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(19)


def main(arguments: Sequence[str]) -> int:
    """Exit status 0 when every journal was sealed whole."""
    _give_way()
    root, *names = arguments
    failures = seal_all(Path(root), names)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

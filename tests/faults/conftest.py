"""Fault tests write and read thousands of small files: in memory where that is possible."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_tmp(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir=memory, prefix="loopscope-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

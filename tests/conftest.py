"""Shapes and dtypes are checked at run time in tests: jaxtyping's annotations, enforced by beartype."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from jaxtyping import config as shape_checks
from jaxtyping import install_import_hook
from xdist.scheduler import LoadFileScheduling

from rank_processes import RankProcesses

_HERE = Path(__file__).parent

# Only packages whose functions take and return tensors; everything else is mypy's business.
_CHECKED = ("loopscope.metrics", "loopscope.trace")

# Held for the whole session: the hook must be in place before the first import of these packages.
_HOOK = install_import_hook(_CHECKED, "beartype.beartype")


@cache
def _with_ranks(path: Path) -> bool:
    return path.suffix == ".py" and "pytest.mark.ranks" in path.read_text(encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with ranks come first, since they take longest."""
    items.sort(key=lambda item: not _with_ranks(item.path))


class _Scheduling(LoadFileScheduling):
    """For several workers: a file's tests stay together, and so do all files with ranks.

    The worker that gets these imports what ranks need once.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "ranks" if _with_ranks(self.config.rootpath / file) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


# Where tensors are what a test is about. Elsewhere trainings of hundreds of steps would check the same calls again and
# again, which takes longer than the trainings themselves.
_CHECKED_IN = {"capture", "cases", "collect", "metrics", "probe", "trace"}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: a run that tests share is made under the same rule as they."""
    room = item.path.relative_to(_HERE).parts[0] if item.path.is_relative_to(_HERE) else ""
    shape_checks.update("jaxtyping_disable", room not in _CHECKED_IN)


# A change must not fail for an input that another change's run happened upon: continuous integration tries the
# same examples every time, everybody else new ones. No example has a deadline: a busy machine is not a fault.
settings.register_profile("everybody", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("LOOPSCOPE_EXAMPLES") or ("ci" if os.environ.get("CI") else "everybody"))

# A shell ignores Ctrl-C for what it starts in the background, and a process inherits that: tests of Ctrl-C would wait
# for what never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_WANDB_SERVICE = os.environ.get("WANDB_SERVICE")


@pytest.fixture(autouse=True)
def _no_service_left_behind() -> Iterator[None]:
    """W&B puts the address of its helper process into the environment, and a test may end that process.

    A notebook that the same worker starts afterwards would try to reach it.
    """
    yield
    if _WANDB_SERVICE is None:
        os.environ.pop("WANDB_SERVICE", None)


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[RankProcesses]:
    """Runs scripts on ranks; torch and torchtitan are imported once for all of them."""
    processes = RankProcesses()
    yield processes
    processes.close()

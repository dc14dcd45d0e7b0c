"""How long the disk lasts: closed forms over an injected clock, and the row that says it."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_runs import QUIET, loss

from loopscope.analysis import open_run
from loopscope.store import RunStore
from loopscope.store.write.space import CRITICAL_S, SHORTEST_S, WARN_S, SpaceForecast, free_bytes, run_bytes

RATE = 1000.0
"""Bytes a second that the run takes."""


class Disk:
    """A disk and a clock that the test turns."""

    def __init__(self) -> None:
        self.now, self.free = 0.0, 10**12
        self.forecast = SpaceForecast(
            lambda: Path("/"),
            clock=lambda: self.now,
            free=lambda root: self.free,
            used=lambda root: int(50 + RATE * self.now),
        )

    def after(self, seconds: float, lasts: float) -> tuple[str, float] | None:
        self.now += seconds
        self.free = int(RATE * lasts)
        found = self.forecast.look()
        return None if found is None else (found.severity, found.hours)


def test_hours_are_free_space_by_the_runs_own_rate() -> None:
    disk = Disk()
    assert disk.after(60, CRITICAL_S / 2) is None  # the first look is what growth is measured from
    assert disk.after(SHORTEST_S - 1, CRITICAL_S / 2) is None
    assert disk.after(59, CRITICAL_S / 2) is None  # within a minute of the last look
    assert disk.after(61, WARN_S + 60) is None
    assert disk.after(60, WARN_S / 2) == ("warn", pytest.approx(12.0))
    assert disk.after(60, WARN_S / 3) is None  # said
    assert disk.after(60, CRITICAL_S / 2) == ("critical", pytest.approx(0.5))
    assert disk.after(60, WARN_S / 2) is None  # better, and not worse than what was said
    assert disk.after(60, 2 * WARN_S) is None
    assert disk.after(60, WARN_S / 2) == ("warn", pytest.approx(12.0))


def test_a_run_that_does_not_grow_fills_no_disk() -> None:
    disk = Disk()
    forecast = SpaceForecast(
        lambda: Path("/"), clock=lambda: disk.now, free=lambda root: 0, used=lambda root: 7
    )
    for disk.now in (60.0, 1000.0, 2000.0):
        assert forecast.look() is None


def test_a_disk_that_fills_up_is_a_health_row(tmp_path: Path) -> None:
    disk = Disk()
    with RunStore.create(tmp_path / "run", options=QUIET) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        assert writer.space is not None
        writer.space = disk.forecast
        writer.append("loss", loss(3, 1.0))
        for seconds, lasts in ((60, 60), (SHORTEST_S + 60, 1800), (60, 1800)):
            disk.now, disk.free = disk.now + seconds, int(RATE * lasts)
            writer.tick()
    rows = open_run(tmp_path / "run").sql(
        "select step, severity, round(value, 3), detail from health where event = 'disk_filling'"
    )
    ((step, severity, hours, detail),) = rows.fetchall()
    assert (step, severity, hours) == (3, "critical", 0.5)
    assert detail.startswith(
        "1.7 MiB are free, and this run alone takes 3.4 MiB an hour: about 0.5 hours are left."
    )


def test_what_a_run_takes_is_what_its_files_hold(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run", options=QUIET) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        before = run_bytes(tmp_path / "run")
        for step in range(1, 101):
            writer.append("loss", loss(step, 1.0))
        journal = next((tmp_path / "run" / "journal").glob("*.wal"))
        assert run_bytes(tmp_path / "run") - before == pytest.approx(journal.stat().st_size, rel=0.2)
    files = [path for part in ("journal", "tables") for path in (tmp_path / "run" / part).rglob("*")]
    assert run_bytes(tmp_path / "run") == sum(path.stat().st_size for path in files if path.is_file())
    assert free_bytes(tmp_path) > 0

"""The pages in a real browser: they open, draw, follow a live run, and do nothing that a run's name says."""

import contextlib
import shutil
import time

import browser as chromium
import pytest
from report_runs import Shape, generated_run
from service_runs import finished_run, loss_row, open_writer, server

from loopscope import open_run
from loopscope.report import write_report

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
DRAWN = "document.body.dataset.ready === 'true'"
FAILED = "document.querySelectorAll('[data-failed]').length"
CHARTS = "document.querySelectorAll('[data-chart] svg').length"


@pytest.fixture
def serve():
    """Serves a folder on a free port of this machine; gives the address."""
    with contextlib.ExitStack() as running:
        yield lambda root: running.enter_context(server(root))


@pytest.mark.long
def test_the_report_draws_every_chart_and_asks_nobody(tmp_path):
    run = generated_run(tmp_path / "run", Shape(), name=HOSTILE)
    out = tmp_path / "report.html"
    (part,) = write_report([open_run(run)], out)
    charts = sum(1 for section in part.sections for chart in section.charts if chart.data.num_rows)
    with chromium.Browser(PROGRAM) as tab:
        tab.open(out.as_uri())
        tab.wait(DRAWN)
        assert (tab.value(CHARTS), tab.value(FAILED)) == (charts, 0)
        assert tab.value("document.querySelector('h1').textContent") == HOSTILE
        wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert tab.value(wide) is True
        outside = [url for url in tab.requests if not url.startswith(("file:", "data:", "about:"))]
        assert (outside, tab.dialogs, tab.errors) == ([], [], [])
    with chromium.Browser(PROGRAM, width=390, height=844) as phone:
        phone.open(out.as_uri())
        phone.wait(DRAWN)
        assert phone.value(wide) is True


@pytest.mark.long
def test_sections_are_folded_and_a_link_unfolds_what_it_leads_to(tmp_path):
    run = generated_run(tmp_path / "run", Shape(steps=50))
    out = tmp_path / "report.html"
    write_report([open_run(run)] * 2, out)
    drawn = "document.querySelectorAll('#r1 [data-drawn]').length"
    with chromium.Browser(PROGRAM) as tab:
        tab.open(out.as_uri())
        tab.wait(DRAWN)
        assert tab.value(drawn) == 0
        tab.value("location.hash = '#r1-growth'")
        tab.wait("document.querySelector('#r1-growth [data-drawn]') !== null")
        assert tab.value("document.querySelector('#r1-s-loop').open") is True
        tab.wait("document.querySelector('.top [aria-current]').getAttribute('href') === '#r1'")
        # A chart of one line says in its title what it is; one of several has a legend.
        tab.value("document.querySelector('#r1-s-loss > summary').click()")
        tab.wait("document.querySelector('#r1-closure [data-drawn]') !== null")
        legends = "document.querySelectorAll('#r1-{} .mark-symbol.role-legend-symbol').length"
        assert (tab.value(legends.format("lb_loss")), tab.value(legends.format("loss"))) == (0, 2)
        tab.value("document.getElementById('fold').click()")
        assert tab.value("document.querySelectorAll('details.section[open]').length") == 0
        tab.wait("document.getElementById('fold').textContent === 'Unfold all'")
        assert (tab.value(FAILED), tab.errors) == (0, [])


def test_a_live_page_follows_the_run_and_a_hostile_name_does_nothing(tmp_path, serve):
    store, writer = open_writer(tmp_path / "live", name=HOSTILE)
    for step in range(1, 4):
        writer.append("loss", loss_row(step))
    writer.flush()
    address = serve(tmp_path)
    with chromium.Browser(PROGRAM) as tab:
        tab.open(address)
        tab.wait(f"document.querySelector('[data-cell=step]')?.textContent === '3' && {DRAWN}")
        assert tab.value("document.querySelector('td a').textContent") == HOSTILE
        tab.open(address + tab.value("document.querySelector('td a').getAttribute('href')"))
        tab.wait(f"location.pathname !== '/' && {DRAWN} && {CHARTS} >= 4")
        assert tab.value(FAILED) == 0
        for step in (4, 5):
            writer.append("loss", loss_row(step))
            writer.flush()
            written = time.monotonic()
            tab.wait(f"[...document.querySelectorAll('.facts dd')].some((e) => e.textContent === '{step}')")
            assert time.monotonic() - written < 5
        store.close()
        tab.wait("document.body.dataset.state === 'finished'")
        # What is shown stays, with a word that it is the last; a refused answer is an error of the browser's log.
        shutil.rmtree(tmp_path / "live")
        tab.wait("document.getElementById('connection').textContent.includes('no longer there')")
        assert tab.value(CHARTS) >= 4
        tab.errors = [error for error in tab.errors if "404" not in error]
        outside = [url for url in tab.requests if not url.startswith((address, "data:", "about:"))]
        assert (outside, tab.dialogs, tab.errors) == ([], [], [])


@pytest.mark.long
def test_runs_are_ticked_and_compared(tmp_path, serve):
    for name in ("a", "b"):
        finished_run(tmp_path / name, name=name)
    address = serve(tmp_path)
    with chromium.Browser(PROGRAM) as tab:
        tab.open(address)
        tab.wait(DRAWN)
        tab.value("document.querySelectorAll('input[name=run]').forEach((e) => e.click())")
        tab.value("document.querySelector('form button').click()")
        tab.wait(f"location.pathname === '/compare' && {DRAWN} && {CHARTS} > 0")
        assert (tab.value(FAILED), tab.errors) == (0, [])

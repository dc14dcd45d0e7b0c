"""Deliveries: what arrives, what is cut off and told, and what never reaches the training thread."""

import base64
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loopscope.alerts import AlertConfig, AlertingWriter, AlertNotice, AlertSettings
from loopscope.alerts.command import Command
from loopscope.alerts.delivery import Notifier
from loopscope.alerts.gather import merged
from loopscope.alerts.webhook import Webhook
from loopscope.collect.writer import MemoryWriter
from loopscope.errors import LoopscopeError

RULES = AlertSettings(warmup_steps=0, sustain=2)


def notice(**changes):
    fields = {
        "run_id": "r", "run_name": "mine", "attempt": 1, "step": 20, "rule": "maxvio", "severity": "warn",
        "subject": "head 0", "since": 10, "title": "Too much", "text": "3 > 2", "why": "so", "places": ("head 0",),
    }  # fmt: skip
    return AlertNotice(**{**fields, **changes})


def visit(step, entropy, position=0):
    return {
        "step": step, "run_id": "r", "attempt": 1, "block": "head", "unrolled_pos": position, "num_experts": 4,
        "top_k": 1, "num_tokens": 400, "load_entropy_ratio": entropy, "aggregation_scope": "global",
    }  # fmt: skip


def sick_run(writer, visits=1, steps=2):
    for step in range(1, steps + 1):
        writer.append_many("router", [visit(step, 0.3, position) for position in range(visits)])
        writer.append("health", {"step": step, "event": "coverage", "severity": "info"})


@pytest.fixture
def server():
    """A web server that notes bodies, and answers with the statuses it is given, the last of them for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.bodies.append(json.loads(body))
            self.server.users.append(self.headers["Authorization"])
            if self.server.hang:
                self.server.hang.wait(20)
            statuses = self.server.statuses
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"{self.server.url}/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.daemon_threads = True
    found.bodies, found.users, found.statuses, found.hang = [], [], [204], None
    found.url = f"http://127.0.0.1:{found.server_port}/hook/tok3n?key=hunter2"
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    if found.hang:
        found.hang.set()
    found.shutdown()
    found.server_close()


def test_a_webhook_gets_the_notice_and_a_message_for_people(server):
    Webhook(server.url, timeout_s=5)(notice(run_name="Läufe <!channel>"))
    (body,) = server.bodies
    assert body["alert"]["rule"] == "maxvio"
    assert body["alert"]["places"] == ["head 0"]
    assert body["text"] == body["content"]
    assert body["text"].splitlines()[0] == "[warn] Läufe <!channel>: Too much (step 20)"


def test_user_and_password_of_the_address_become_a_header(server):
    Webhook(server.url.replace("http://", "http://me:w%40rd@"), timeout_s=5)(notice())
    assert base64.b64decode(server.users[0].removeprefix("Basic ")) == b"me:w@rd"


@pytest.mark.parametrize(("statuses", "posts"), [([503, 429, 200], 3), ([500], 3), ([404], 1), ([302], 1)])
def test_a_webhook_tries_again_only_where_the_server_says_not_now(server, statuses, posts):
    server.statuses = list(statuses)
    hook = Webhook(server.url, timeout_s=10)
    if statuses[-1] == 200:
        hook(notice())
    else:
        with pytest.raises(LoopscopeError, match=f"answered {statuses[-1]}"):
            hook(notice())
    assert len(server.bodies) == posts


def test_a_refused_connection_is_told_without_the_address():
    with pytest.raises(LoopscopeError) as caught:
        Webhook("http://user:hunter2@127.0.0.1:9/tok3n", timeout_s=1)(notice())
    assert "ConnectionRefused" in str(caught.value)
    assert "tok3n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_command_gets_the_notice_in_both_ways(tmp_path):
    code = (
        "import json, os, sys; found = json.load(sys.stdin); found['env'] = {k: v for k, v in os.environ.items() "
        "if k.startswith('LOOPSCOPE_ALERT_')}; json.dump(found, open(sys.argv[1], 'w'))"
    )
    Command((sys.executable, "-c", code, str(tmp_path / "seen")), timeout_s=20)(notice(run_name="a\0b"))
    found = json.loads((tmp_path / "seen").read_text())
    assert (found["rule"], found["step"], found["env"]["LOOPSCOPE_ALERT_RULE"]) == ("maxvio", 20, "maxvio")
    assert found["env"]["LOOPSCOPE_ALERT_RUN_NAME"] == "ab"
    assert found["env"]["LOOPSCOPE_ALERT_MESSAGE"].endswith("so")


def test_no_shell_reads_the_arguments(tmp_path):
    target = tmp_path / "made"
    command = Command((sys.executable, "-c", "pass", f"; touch {target}", "$(touch x)"), timeout_s=20)
    command(notice(run_name=f"$(touch {target})", subject=f"`touch {target}`"))
    assert not target.exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [("raise SystemExit(3)", "status 3"), ("import os; os.kill(os.getpid(), 9)", "signal 9")],
)
def test_a_command_that_fails_is_told(code, words):
    with pytest.raises(LoopscopeError, match=words):
        Command((sys.executable, "-c", code), timeout_s=20)(notice())


def test_a_hanging_command_is_killed_with_what_it_started(tmp_path):
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(60)"
    )
    began = time.monotonic()
    with pytest.raises(LoopscopeError, match="did not end within 3 s, and was killed"):
        Command((sys.executable, "-c", code), timeout_s=3)(notice())
    assert time.monotonic() - began < 30
    for pid in map(int, pids.read_text().split()):
        for _ in range(100):  # a killed grandchild is reaped by init
            if not _runs(pid):
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"{pid} still runs")


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_broken_run_reaches_every_receiver_and_the_health_table(server, tmp_path):
    seen = tmp_path / "seen"
    code = f"import sys; open({str(seen)!r}, 'a').write(sys.stdin.read() + chr(10))"
    config = AlertConfig(rules=RULES, command=(sys.executable, "-c", code), webhook=server.url, timeout_s=20)
    heard, inner = [], MemoryWriter()
    writer = AlertingWriter(
        inner, config=config, sinks={**config.sinks(), "x": heard.append}, run_name="mine"
    )
    sick_run(writer)
    writer._notifier.close(30)
    writer.close()
    (row,) = [row for row in inner.rows("health") if row["event"] == "alert"]
    assert row["severity"] == "critical"
    (told,) = heard
    assert (
        json.loads(seen.read_text())["rule"]
        == server.bodies[0]["alert"]["rule"]
        == told.rule
        == "load_entropy"
    )
    assert not inner.rows("health", event="alert_not_delivered")


def test_what_cannot_be_delivered_is_a_health_row_without_a_secret(server, caplog):
    server.statuses = [403]
    config = AlertConfig(rules=RULES, webhook=server.url)
    inner = MemoryWriter()
    writer = AlertingWriter(inner, config=config, sinks=config.sinks(), run_name="mine")
    sick_run(writer)
    writer.close()
    (row,) = inner.rows("health", event="alert_not_delivered")
    assert (row["severity"], row["step"], row["attempt"]) == ("warn", 2, 1)
    assert row["detail"] == "webhook: answered 403 (load_entropy at step 2)"
    assert not any(secret in caplog.text + str(inner.tables) for secret in ("tok3n", "hunter2"))
    # It is an alert itself, under a rule of its own, as a replay will find.
    assert [alert.rule for alert in writer.engine.alerts] == ["load_entropy", "other"]


def test_a_failure_is_told_through_the_receivers_that_work(server):
    def broken(notice):
        raise OSError("cannot reach https://user:pass@secret.example/tok3n now")

    heard, inner = [], MemoryWriter()
    writer = AlertingWriter(inner, RULES, sinks={"broken": broken, "list": heard.append})
    sick_run(writer)
    for _ in range(200):
        writer.flush()
        if len(heard) == 2:
            break
        time.sleep(0.02)
    writer.close()
    assert [told.rule for told in heard] == ["load_entropy", "other"]
    (row,) = inner.rows("health", event="alert_not_delivered")
    assert "OSError: cannot reach *** now" in row["detail"]


def test_a_hanging_webhook_is_cut_off_and_holds_nobody_up(server):
    server.hang = threading.Event()
    config = AlertConfig(rules=RULES, webhook=server.url, timeout_s=0.5)
    heard, inner = [], MemoryWriter()
    writer = AlertingWriter(inner, config=config, sinks={**config.sinks(), "list": heard.append})
    sick_run(writer)
    writer.close()
    assert [told.rule for told in heard] == ["load_entropy"]
    (row,) = inner.rows("health", event="alert_not_delivered")
    assert row["detail"] == "webhook: did not answer in time (load_entropy at step 2)"


def test_a_receiver_that_never_returns_costs_a_bounded_wait_at_the_end():
    gate = threading.Event()
    notifier = Notifier({"stuck": lambda _: gate.wait(60)}, timeout_s=30)
    notifier.send(notice())
    notifier.send(notice(rule="z"))
    began = time.monotonic()
    notifier.close(0.5)
    assert time.monotonic() - began < 10
    failures = notifier.failures()
    gate.set()
    assert [failure.reason for failure in failures] == ["the run ended before the delivery did"] * 2
    assert {failure.notice.rule for failure in failures} == {"maxvio", "z"}


def test_after_one_that_hangs_no_second_is_started():
    gate, started = threading.Event(), []

    def stuck(told):
        started.append(told.rule)
        gate.wait(60)

    notifier = Notifier({"stuck": stuck}, timeout_s=0.1)
    for rule in ("maxvio", "z"):
        notifier.send(notice(rule=rule))
    notifier.close(30)
    gate.set()
    assert started == ["maxvio"]
    assert [f.reason for f in notifier.failures()] == [
        "did not end within 0.1 s",
        "an earlier delivery still hangs",
    ]


def test_hundreds_of_visits_that_break_at_once_are_one_notice():
    heard = []
    writer = AlertingWriter(MemoryWriter(), RULES, sinks={"list": heard.append})
    sick_run(writer, visits=300)
    writer.close()
    (told,) = heard
    assert told.num_places == 300
    assert len(told.places) == 20
    assert told.subject == "300 places (head 0; head 1; head 2; and 297 more)"
    assert len(told.as_json()) < 4000


def test_what_follows_within_minutes_is_gathered_into_one_more():
    heard, inner = [], MemoryWriter()
    writer = AlertingWriter(inner, RULES, sinks={"list": heard.append})
    for step in range(1, 60):
        # One visit more is sick at every step.
        rows = [visit(step, 0.3 if position < step else 1.0, position) for position in range(50)]
        writer.append_many("router", rows)
        writer.append("health", {"step": step, "event": "coverage", "severity": "info"})
    writer.close()
    assert len(inner.rows("health", event="alert")) == 50
    assert len(heard) <= 2
    assert heard[0].places[0] == "head 0"
    assert sum(told.num_places for told in heard) == 50


def test_what_is_merged_counts_a_place_once_and_names_the_newest():
    first = notice(since=3, places=("head 0", "head 1"), num_places=25, subject="25 places (...)")
    both = merged(first, notice(step=30, since=9, subject="head 1", places=("head 1",)))
    assert (both.num_places, both.since, both.step) == (25, 3, 30)
    assert both.subject == "25 places (head 0; head 1; and 23 more)"
    assert both.text == "newest 3 > 2 (head 1)"
    third = merged(both, notice(step=31, subject="head 2", places=("head 2",)))
    assert third.places == ("head 0", "head 1", "head 2")
    assert third.text == "newest 3 > 2 (head 2)"


def test_without_gathering_each_is_told_at_once():
    heard = []
    notifier = Notifier({"list": heard.append}, gather_s=0)
    for step in range(5):
        notifier.send(notice(step=step))
        for _ in range(200):
            if len(heard) > step:
                break
            time.sleep(0.01)
    notifier.close()
    assert [told.step for told in heard] == [0, 1, 2, 3, 4]


def test_warnings_can_be_left_to_the_log():
    heard, inner = [], MemoryWriter()
    config = AlertConfig(rules=RULES, min_severity="critical")
    writer = AlertingWriter(inner, config=config, sinks={"list": heard.append})
    for step in (1, 2, 3, 4, 5):
        writer.append("router", visit(step, 0.7 if step < 4 else 0.3))
        writer.append("health", {"step": step, "event": "coverage", "severity": "info"})
    writer.close()
    assert [row["severity"] for row in inner.rows("health", event="alert")] == ["warn", "critical"]
    assert [(told.severity, told.step) for told in heard] == [("critical", 5)]


def test_a_forked_child_tells_nothing():
    heard, inner = [], MemoryWriter()
    writer = AlertingWriter(inner, RULES, sinks={"list": heard.append})
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        sick_run(writer)
        writer.close()
        time.sleep(0.2)
        os.write(
            write, bytes([len(heard), len(writer.engine.alerts), len(inner.rows("health", event="alert"))])
        )
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 3) == bytes([0, 0, 0])
    os.close(read)
    os.close(write)
    sick_run(writer)
    writer.close()
    assert len(heard) == 1


def test_another_rank_logs_its_events_and_tells_nobody(caplog):
    heard, inner = [], MemoryWriter()
    writer = AlertingWriter(inner, RULES, sinks={"list": heard.append}, speaks=False)
    sick_run(writer)
    writer.append("health", {"step": 3, "event": "nonfinite", "severity": "critical", "detail": "2 logits"})
    writer.close()
    assert heard == []
    assert not inner.rows("health", event="alert")
    assert "2 logits" in caplog.text


def test_rows_that_the_store_lost_are_told_though_no_row_says_so():
    heard, inner = [], MemoryWriter()
    writer = AlertingWriter(inner, RULES, sinks={"list": heard.append})
    writer.append("loss", {"step": 1, "total_loss": 1.0})
    inner.dropped, inner.fsync_failures = 3, 1
    writer.append("loss", {"step": 2, "total_loss": 1.0})
    writer.append("loss", {"step": 3, "total_loss": 1.0})
    writer.close()
    assert [(told.rule, told.step) for told in heard] == [("dropped", 2), ("other", 2)]


def test_an_event_is_told_again_after_a_long_silence():
    heard = []
    rules = AlertSettings(again_after=100)
    writer = AlertingWriter(
        MemoryWriter(), rules, config=AlertConfig(gather_s=0), sinks={"list": heard.append}
    )
    for step in (1, 50, 149, 260):
        writer.append(
            "health", {"step": step, "event": "nonfinite", "severity": "critical", "detail": f"at {step}"}
        )
    writer.close()
    assert [told.step for told in heard] in ([1, 260], [260])  # the end of the run may gather both
    assert [(alert.since, alert.count) for alert in writer.engine.alerts] == [(1, 3), (260, 1)]


def test_a_rule_that_is_off_does_not_judge():
    writer = AlertingWriter(MemoryWriter(), AlertSettings(warmup_steps=0, sustain=2, off=("load_entropy",)))
    sick_run(writer, steps=5)
    writer.close()
    assert writer.engine.alerts == []

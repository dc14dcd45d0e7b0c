"""Routes, bounds, access: what a client can ask and what it can never reach."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import duckdb
import pytest
from page_reader import Page
from report_runs import Shape, generated_run
from service_runs import client, finished_run, loss_row, open_writer

from loopscope import open_run
from loopscope.errors import ConfigError
from loopscope.report import page, write_report
from loopscope.service import app, catalog, make_app, views
from loopscope.service.catalog import Catalog
from loopscope.service.prometheus import _GAUGES, MOST_RUNS

HOSTILE = '<img src=x onerror=alert(1)>"}\n</script>'


@pytest.fixture
def root(tmp_path):
    finished_run(tmp_path / "one", name="first")
    finished_run(tmp_path / "deep" / "er" / "two", name="second", steps=8)
    return tmp_path


def keys(browser):
    return {run["name"]: run["key"] for run in browser.get("/api/runs").json()["runs"]}


def test_the_list_names_every_run_the_newest_first(root):
    found = client(root).get("/api/runs").json()
    assert [(r["name"], r["place"], r["state"]) for r in found["runs"]] == [
        ("second", "deep/er/two", "finished"), ("first", "one", "finished"),
    ]  # fmt: skip
    assert (found["total"], found["truncated"]) == (2, False)
    assert client(root).get("/api/runs?limit=1").json()["truncated"] is True


def test_a_run_its_version_charts_and_rows(root):
    browser = client(root)
    key = keys(browser)["second"]
    run = browser.get(f"/api/runs/{key}").json()
    assert (run["headline"]["step"], run["headline"]["loss_task"]) == (8, pytest.approx(4.92))
    assert run["headline"]["moe_maxvio_max"] is None
    assert (run["headline"]["health"], run["headline"]["findings"]) == ("young", [])
    assert browser.get(f"/api/runs/{key}/version").json()["state"] == "finished"
    assert "r0-loss" in browser.get(f"/api/runs/{key}/charts").json()
    rows = browser.get(f"/api/runs/{key}/tables/loss?columns=step,task_loss,lr&from=7&limit=1").json()
    assert rows["rows"] == [[7, pytest.approx(4.93), None]]
    assert rows["truncated"] is True
    assert browser.get(f"/api/runs/{key}/tables/attempt").json()["rows"]
    assert browser.get(f"/api/runs/{key}/tables/router").json()["rows"] == []


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/tables/nope", 422, "there is no table 'nope'"),
        ("/tables/loss?columns=a%22b", 422, "has no column"),
        ("/tables/loss?limit=10001", 422, "expected an integer from 1 to 10000"),
        ("/tables/loss?limit=0", 422, "limit is '0'"),
        ("/tables/loss?from=1%20or%201", 422, "from is"),
        ("/tables/loss?from=-1", 422, "from is"),
        ("/tables/loss?from=", 422, "from is"),
        ("/tables/loss?from=" + "9" * 500, 422, "from is"),
        ("/tables/loss?from=" + "0" * 5000, 422, "from is"),
        ("/tables/loss?from=" + "0" * 20 + "9" * 20, 422, "from is"),
        ("/tables/loss?columns=" + ",".join(["step"] * 33), 422, "got 33 columns"),
    ],
)
def test_wrong_questions_are_answered_with_what_was_expected(root, path, status, says):
    browser = client(root)
    answer = browser.get(f"/api/runs/{keys(browser)['first']}{path}")
    assert answer.status_code == status
    assert says in answer.json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/runs/one",
        "/runs/..%2f..%2fetc%2fpasswd",
        "/api/runs/0123456789abcdef",
        "/api/runs/%00",
        "/static/../app.py",
    ],
)
def test_a_path_is_no_key(root, path):
    assert client(root).get(path).status_code == 404


def test_nobody_elses_links_out_of_the_root_are_followed(root, tmp_path_factory, monkeypatch):
    outside = finished_run(tmp_path_factory.mktemp("outside") / "secret", name="secret")
    (root / "half").mkdir()
    (root / "half" / "run.json").symlink_to(outside / "run.json")
    assert "secret" not in keys(client(root))
    (root / "link").symlink_to(outside)
    (root / "around").symlink_to(root)
    assert keys(client(root)).keys() == {"first", "second", "secret"}
    monkeypatch.setattr(catalog, "_is_ours", lambda entry: not entry.is_symlink())
    assert "secret" not in keys(client(root))
    monkeypatch.undo()
    if os.geteuid() == 0:
        os.lchown(root / "link", 12345, -1)
        assert "secret" not in keys(client(root))


def test_only_this_machine_is_answered(root):
    assert client(root).get("/").status_code == 200
    assert client(root, host="http://localhost:1").get("/").status_code == 200
    assert client(root, host="http://[::1]:8321").get("/").status_code == 200
    # A page elsewhere whose name was made to point here.
    for path in ("/", "/api/runs", "/metrics", "/static/vega.js"):
        assert client(root, host="http://evil.example").get(path).status_code == 403


def test_a_token_is_asked_for_and_moves_into_a_cookie(root):
    browser = client(root, token="secret token", host="http://10.0.0.1")
    assert browser.get("/api/runs").status_code == 401
    assert browser.get("/?token=wrong").status_code == 401
    assert browser.get("/api/runs", headers={"authorization": "Bearer secret token"}).status_code == 200
    answer = browser.get("http://10.0.0.1//evil.example/?token=secret%20token")
    assert (answer.status_code, answer.headers["location"]) == (303, "/evil.example/")
    assert "httponly" in answer.headers["set-cookie"].lower()


def test_pages_carry_a_policy_and_names_are_text(tmp_path):
    finished_run(tmp_path / "x", name=HOSTILE)
    finished_run(tmp_path / "y", name="plain")
    browser = client(tmp_path)
    found = keys(browser)
    pages = ["/", f"/runs/{found[HOSTILE]}", f"/compare?run={found[HOSTILE]}&run={found['plain']}&by=tokens"]
    for path in pages:
        answer = browser.get(path)
        assert answer.status_code == 200, path
        assert "<img" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self' 'nonce-")
        assert "unsafe-inline" not in policy.partition("style-src")[0]
        assert answer.headers["x-content-type-options"] == "nosniff"
    gauges = browser.get("/metrics").text
    assert r'run="<img src=x onerror=alert(1)>\"}\n</script>"' in gauges
    assert all(line.startswith(("#", "loopscope_")) for line in gauges.splitlines())


def test_comparisons_take_two_to_eight_runs(root):
    browser = client(root)
    first = keys(browser)["first"]
    assert browser.get(f"/compare?run={first}").status_code == 422
    assert browser.get(f"/compare?run={first}&run={first}").status_code == 422
    assert browser.get("/compare?run=a&run=b&by=hour").status_code == 422
    assert browser.get(f"/compare?run={first}&run=0123456789abcdef").status_code == 404


def test_gauges_are_those_of_the_last_step_and_few(root):
    text = client(root).get("/metrics").text
    key = keys(client(root))["second"]
    assert f'loopscope_step{{run="second",key="{key}"}} 8' in text
    assert f'loopscope_live{{run="second",key="{key}"}} 0' in text
    assert f'loopscope_alerts{{run="second",key="{key}",severity="critical"}} 0' in text
    assert "loopscope_moe_maxvio_max{" not in text  # never measured: no sample
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    names = {line.partition("{")[0] for line in samples}
    assert len(names) < 25
    described = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert {name.split()[0] for name in names} <= described


def test_the_gauges_of_a_deep_model_and_of_many_runs_are_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "_SCRAPE_S", 600.0)
    monkeypatch.setattr(app, "MOST_GAUGED", 6)
    # 34 visits at 64 experts, all traced: what a monitoring system stores does not grow with them.
    generated_run(tmp_path / "deep", Shape(steps=20, loops=8, layers=4, experts=64), name="n" * 5000)
    for i in range(8):
        shutil.copytree(tmp_path / "deep", tmp_path / f"r{i:02d}")
    text = client(tmp_path).get("/metrics").text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert len({line.partition("}")[0] for line in samples}) == len(samples)
    per_run = (len(samples) - 1) / 6
    assert per_run == len(_GAUGES) + 3
    assert per_run < 20
    assert max(map(len, samples)) < 250


def test_a_scrape_ends_in_time_and_the_next_one_goes_on(root, monkeypatch):
    monkeypatch.setattr(app, "_SCRAPE_S", -1.0)
    browser = client(root)
    assert "loopscope_step{" not in browser.get("/metrics").text
    monkeypatch.setattr(app, "_SCRAPE_S", 60.0)
    assert browser.get("/metrics").text.count("loopscope_step{") == 2


def test_a_comparison_is_aligned_by_tokens_and_follows_its_runs(tmp_path, monkeypatch):
    # The same losses; the second run sees twice the tokens per step.
    for name, factor in (("a", 1), ("b", 2)):
        _, writer = open_writer(tmp_path / name, name=name)
        for step in (1, 2, 3):
            writer.append("loss", loss_row(step, tokens_seen=step * 100 * factor))
        writer.flush()
    browser = client(tmp_path)
    found = keys(browser)
    asked = f"run={found['a']}&run={found['b']}"
    places = {
        "step": {"a": [1, 2, 3], "b": [1, 2, 3]},
        "tokens": {"a": [100, 200, 300], "b": [200, 400, 600]},
    }
    for by, expected in places.items():
        page = Page(browser.get(f"/compare?{asked}&by={by}").text)
        rows = page.rows("c-task_loss")
        assert {name: [row[by] for row in rows if row["run"] == name] for name in "ab"} == expected
    before = browser.get(f"/api/compare/version?{asked}").json()
    writer.append("loss", loss_row(4))
    writer.flush()
    after = browser.get(f"/api/compare/version?{asked}").json()
    assert before["version"] != after["version"]
    assert after["state"] == "running"
    assert len(Page(browser.get(f"/compare?{asked}").text).rows("c-task_loss")) == 7
    shutil.rmtree(tmp_path / "a")
    assert browser.get(f"/api/compare/version?{asked}").status_code == 404


def test_a_live_run_is_seen_as_it_grows_and_read_once_per_change(tmp_path, monkeypatch):
    store, writer = open_writer(tmp_path / "live", name="live")
    writer.append("loss", loss_row(1))
    writer.flush()
    read = []
    real = views.headline
    monkeypatch.setattr(views, "headline", lambda *given: read.append(1) or real(*given))
    browser = client(tmp_path)
    key = keys(browser)["live"]
    before = browser.get(f"/api/runs/{key}/version").json()
    assert before["state"] == "running"
    for _ in range(3):
        assert browser.get(f"/api/runs/{key}").json()["headline"]["step"] == 1
    assert len(read) == 1
    writer.append("loss", loss_row(2))
    writer.flush()
    assert browser.get(f"/api/runs/{key}/version").json()["version"] != before["version"]
    assert browser.get(f"/api/runs/{key}").json()["headline"]["step"] == 2
    store.close()
    assert browser.get(f"/api/runs/{key}/version").json()["state"] == "finished"


def test_a_run_that_is_deleted_while_shown(root):
    browser = client(root)
    key = keys(browser)["first"]
    assert browser.get(f"/runs/{key}").status_code == 200
    shutil.rmtree(root / "one")
    for path in (f"/api/runs/{key}/version", f"/api/runs/{key}", f"/runs/{key}"):
        assert browser.get(path).status_code == 404, path
    assert browser.get("/metrics").status_code == 200


def test_files_that_go_away_under_a_reading_are_a_deleted_run_or_are_read_again(root, monkeypatch):
    browser = client(root)
    key = keys(browser)["first"]
    real, tried = views.headline, []

    def headline(*given):
        tried.append(1)
        if len(tried) == 1:
            raise duckdb.IOException("No files found that match the pattern")
        return real(*given)

    monkeypatch.setattr(views, "headline", headline)
    assert browser.get(f"/api/runs/{key}").status_code == 200
    assert len(tried) == 2

    def gone(*given):
        shutil.rmtree(root / "one", ignore_errors=True)
        raise duckdb.IOException("No files found that match the pattern")

    monkeypatch.setattr(views, "read_run_page", gone)
    assert browser.get(f"/runs/{key}").status_code == 404


def test_a_run_that_is_deleted_while_it_is_read_is_not_shown_as_an_empty_one(root, monkeypatch):
    browser = client(root)
    key, real = keys(browser)["first"], views.read_run_page

    def half(run, *given):
        shutil.rmtree(root / "one" / "tables", ignore_errors=True)
        (root / "one" / "run.json").unlink()
        return real(run, *given)

    monkeypatch.setattr(views, "read_run_page", half)
    answer = browser.get(f"/runs/{key}")
    assert (answer.status_code, answer.text) == (404, "the run is no longer there\n")


def test_a_run_whose_manifest_is_broken_is_listed_and_breaks_nothing(root):
    (root / "one" / "run.json").write_text("{")
    browser = client(root)
    broken = [run for run in browser.get("/api/runs").json()["runs"] if run["state"] == "unreadable"]
    assert len(broken) == 1
    assert "not a valid run manifest" in broken[0]["problem"]
    assert browser.get("/").status_code == 200
    assert browser.get("/metrics").status_code == 200


def test_names_that_are_no_valid_text_cost_the_other_runs_nothing(root, monkeypatch):
    # A folder whose name is not UTF-8, and a run that is named after it.
    odd = root / "odd-\udcff"
    try:
        shutil.copytree(root / "one", odd)
    except OSError:
        pytest.skip("this disk takes valid names alone")
    stored = json.loads((odd / "run.json").read_text())
    stored["checksum"] = "none"
    (odd / "run.json").write_text(json.dumps(stored | {"run_name": ""}))
    browser = client(root)
    places = {run["place"]: run["key"] for run in browser.get("/api/runs").json()["runs"]}
    assert set(places) == {"odd-?", "one", "deep/er/two"}
    for key in places.values():
        for path in (f"/runs/{key}", f"/api/runs/{key}", f"/api/runs/{key}/charts"):
            assert browser.get(path).status_code == 200
    assert browser.get("/").status_code == 200
    assert browser.get(f"/compare?run={places['odd-?']}&run={places['one']}").status_code == 200
    assert 'run="odd-?"' in browser.get("/metrics").text
    monkeypatch.setattr(page, "script_bundle", lambda: "/* no script */")
    write_report([open_run(odd)], root / "report.html")


def test_a_thousand_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "_SCRAPE_S", 600.0)
    first = finished_run(tmp_path / "r0000")
    for i in range(1, 1000):
        shutil.copytree(first, tmp_path / f"r{i:04d}")
    browser = client(tmp_path)
    page = browser.get("/")
    assert "1000 runs under this folder" in page.text
    assert page.text.count("<tr data-run=") == 50
    assert browser.get("/?page=20").text.count("<tr data-run=") == 50
    assert browser.get("/?page=21").status_code == 422
    gauges = browser.get("/metrics").text
    assert "loopscope_runs 1000" in gauges
    assert gauges.count("loopscope_step{") == MOST_RUNS == 50


def test_fifty_clients_on_one_run_are_served_by_one_reading(root, monkeypatch):
    made = []
    real = views.read_run_page
    monkeypatch.setattr(views, "read_run_page", lambda *given: made.append(1) or real(*given))
    with client(root) as browser:
        key = keys(browser)["second"]
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda _: browser.get(f"/runs/{key}").status_code, range(50)))
    assert answers == [200] * 50
    assert len(made) == 1


def test_the_description_names_the_routes(root):
    made = make_app(root)
    described = client(root).get("/api/openapi.json").json()
    served = {route.path for route in made.routes if route.path.startswith(("/api", "/metrics"))}
    assert set(described["paths"]) == served
    # What a client that is made from the description would ask is answered.
    (runs,) = described["paths"]["/api/compare/version"]["get"]["parameters"]
    assert (runs["schema"]["type"], runs["schema"]["minItems"], runs["required"]) == ("array", 2, True)
    asked = [("run", key) for key in keys(client(root)).values()]
    assert client(root).get("/api/compare/version", params=asked).status_code == 200
    for path, said in described["paths"].items():
        inside = {p["name"] for p in said["get"]["parameters"] if p["in"] == "path"}
        assert inside == {name for name in ("key", "table") if f"{{{name}}}" in path}


def test_an_empty_folder_and_none(tmp_path):
    assert "0 runs under this folder" in client(tmp_path).get("/").text
    assert Catalog(tmp_path).entries() == []
    with pytest.raises(ConfigError, match="is no folder"):
        make_app(tmp_path / "gone")

"""Probes of finished checkpoints: the rows of the online probe, resumable, and loud about what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from loopscope import open_run
from loopscope.cli import main
from loopscope.errors import ConfigError
from loopscope.integrations.torchtitan import offline
from loopscope.integrations.torchtitan.offline_checkpoint import Training, training_of

pytestmark = pytest.mark.ranks

RUN_LEVEL = {"run_id", "attempt", "elapsed_s", "wall_time", "tokens_seen", "world_size"}
TABLES = (
    "probe_router",
    "probe_overlap",
    "probe_loss",
    "probe_readout",
    "probe_margin",
    "probe_perturbation",
)
SETTINGS = {
    "trace_every": 0,
    "probe_every": 2,
    "probe_deep_every": 2,
    "probe_shuffle_scope": "batch",
    "on_error": "raise",
}


@pytest.fixture(scope="module")
def trained(trainings) -> Path:
    finished = trainings([{"name": "online", "steps": 4, "checkpoint_every": 2, "loopscope": SETTINGS}], 1)
    return finished.root / "online"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copied"))


def checkpoint(run: Path, step: int) -> Path:
    return run / "torchtitan" / "checkpoint" / f"step-{step}"


def rows(run: Path, table: str, step: int):
    found = [row for row in open_run(run).arrow(table).to_pylist() if row["step"] == step]
    return [{name: value for name, value in row.items() if name not in RUN_LEVEL} for row in found]


def test_the_rows_of_the_online_probe(trained: Path, tmp_path: Path) -> None:
    assert main(["probe", "--series", str(trained), "--out", str(tmp_path / "all"), "--deep", "batch"]) == 0
    for step in (2, 4):
        for table in (*TABLES, "probe_specialisation"):
            online = rows(trained, table, step)
            assert online
            assert rows(tmp_path / "all", table, step) == online, (table, step)
    assert rows(tmp_path / "all", "probe_saturation", 4) == rows(trained, "probe_saturation", 4)
    assert open_run(tmp_path / "all").problems == []


def test_going_on_gives_the_rows_of_never_having_stopped(trained: Path, tmp_path: Path, capsys) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["--deep", "batch", "--out"]
    assert main(["probe", "--series", str(trained), *flags, str(whole)]) == 0
    assert main(["probe", str(checkpoint(trained, 2)), *flags, str(parts)]) == 0
    assert main(["probe", "--series", str(trained), *flags, str(parts)]) == 0
    assert "probed 1 checkpoint(s), 1 were done before" in capsys.readouterr().out
    for table in (*TABLES, "probe_saturation"):
        for step in (2, 4):
            assert rows(parts, table, step) == rows(whole, table, step)
    assert main(["probe", "--series", str(trained), *flags, str(parts)]) == 0
    assert "probed 0 checkpoint(s), 2 were done before" in capsys.readouterr().out
    assert main(["probe", "--series", str(trained), "--corpus", "varied", "--out", str(parts)]) == 2
    assert "Name another folder with --out" in capsys.readouterr().err


def test_cut_off_between_a_checkpoints_probe_and_its_deep_probe(
    trained: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    parts = tmp_path / "parts"
    flags = ["--series", str(trained), "--deep", "batch", "--out"]
    deep, calls = offline.run_deep_probe, []

    def cut(*given, **named):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return deep(*given, **named)

    monkeypatch.setattr(offline, "run_deep_probe", cut)
    assert main(["probe", *flags, str(parts)]) == 130
    assert rows(parts, "probe_loss", 4)
    assert not rows(parts, "probe_readout", 4)
    monkeypatch.setattr(offline, "run_deep_probe", deep)
    capsys.readouterr()
    assert main(["probe", *flags, str(parts)]) == 0
    assert "probed 1 checkpoint(s), 1 were done before" in capsys.readouterr().out
    for table in (*TABLES, "probe_specialisation", "probe_saturation"):
        assert rows(parts, table, 4) == rows(trained, table, 4), table


def test_an_earlier_step_does_not_replace_a_later_ones_rows(trained: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["probe", str(checkpoint(trained, 4)), "--out", str(out)]) == 0
    assert main(["probe", str(checkpoint(trained, 2)), "--out", str(out)]) == 2
    assert "probes of the later steps [4]" in capsys.readouterr().err
    assert main(["probe", "--series", str(trained), "--out", str(out)]) == 0
    for step in (2, 4):
        assert rows(out, "probe_loss", step) == rows(trained, "probe_loss", step)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_metadata_that_was_cut_off(copied: Path, tmp_path: Path, share: float, capsys) -> None:
    metadata = checkpoint(copied, 4) / ".metadata"
    raw = metadata.read_bytes()
    metadata.write_bytes(raw[: int(share * len(raw))])
    assert main(["probe", "--series", str(copied), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert "checkpoint step-4" in " ".join(said.err.split())
    assert ".metadata cannot be read" in " ".join(said.err.split())
    assert "probed 1 checkpoint(s), 0 were done before, 1 refused" in said.out


def test_incomplete_checkpoints_are_refused_by_name(copied: Path, tmp_path: Path, capsys) -> None:
    (checkpoint(copied, 4) / ".metadata").unlink()
    out = tmp_path / "out"
    assert main(["probe", "--series", str(copied), "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "checkpoint step-4" in " ".join(said.err.split())
    assert "1 refused" in said.out
    assert rows(out, "probe_loss", 2)
    data = next(checkpoint(copied, 2).glob("*.distcp"))
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size - 1000)
    assert main(["probe", str(checkpoint(copied, 2)), "--out", str(tmp_path / "cut")]) == 1
    assert "is incomplete" in capsys.readouterr().err


def test_another_architecture(copied: Path, tmp_path: Path, capsys) -> None:
    manifest = json.loads((copied / "run.json").read_text())
    manifest["checksum"] = "none"  # changed on purpose
    for layer in manifest["configuration"]["trainer"]["model_spec"]["model"]["layers"]:
        layer["moe"]["routed_experts"]["inner_experts"]["hidden_dim"] //= 2
    (copied / "run.json").write_text(json.dumps(manifest))
    assert main(["probe", str(checkpoint(copied, 2)), "--out", str(tmp_path / "out")]) == 1
    assert "is of another architecture" in capsys.readouterr().err


def test_a_vocabulary_that_is_too_small(copied: Path, tmp_path: Path, capsys) -> None:
    manifest = json.loads((copied / "run.json").read_text())
    manifest["checksum"] = "none"  # changed on purpose
    manifest["configuration"]["trainer"]["model_spec"]["model"]["vocab_size"] = 60
    (copied / "run.json").write_text(json.dumps(manifest))
    assert main(["probe", str(checkpoint(copied, 2)), "--out", str(tmp_path / "out")]) == 1
    assert "the model's vocabulary has 60 tokens" in capsys.readouterr().err


def test_a_tokenizer_that_is_not_the_runs(copied: Path, tmp_path: Path, capsys) -> None:
    manifest = json.loads((copied / "run.json").read_text())
    tokenizer = Path(manifest["configuration"]["trainer"]["hf_assets_path"])
    other = Path(shutil.copytree(tokenizer, tmp_path / "other"))
    changed = json.loads((other / "tokenizer.json").read_text())
    changed["model"]["merges"] = changed["model"]["merges"][:-200]
    (other / "tokenizer.json").write_text(json.dumps(changed))
    flags = ["probe", str(checkpoint(copied, 2)), "--tokenizer", str(other), "--out", str(tmp_path / "out")]
    assert main(flags) == 1
    (own,) = {row["corpus_hash"] for row in rows(copied, "probe_loss", 2)}
    assert f"but {own} in the run's own probes" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
    manifest["checksum"] = "none"  # changed on purpose
    manifest["configuration"]["trainer"]["hf_assets_path"] = str(tmp_path / "gone")
    (copied / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="name it with --tokenizer"):
        training_of(checkpoint(copied, 2))
    training_of(checkpoint(copied, 2), tokenizer=other)
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        training_of(checkpoint(copied, 2), tokenizer=tmp_path / "gone")


def test_comparing(trained: Path, capsys) -> None:
    two, four = (str(checkpoint(trained, step)) for step in (2, 4))
    assert main(["probe", "--compare", two, two]) == 0
    same = capsys.readouterr().out
    assert same.count("no meaningful difference") == 9  # eight visits and the loss
    assert main(["probe", "--compare", two, four]) == 0
    changed = capsys.readouterr().out
    line = next(line for line in changed.splitlines() if "loop step 2, layer 1" in line)
    assert line.split()[-1] == "changed"


def test_comparing_over_few_documents(trained: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "few" / "prose").mkdir(parents=True)
    (tmp_path / "few" / "prose" / "a.txt").write_text(" ".join(f"word {n} and" for n in range(200)))
    corpus = ["build", str(tmp_path / "few"), "--licence", "CC0-1.0", "--description", "x"]
    assert main(["corpus", *corpus]) == 0
    two, four = (str(checkpoint(trained, step)) for step in (2, 4))
    capsys.readouterr()
    assert main(["probe", "--compare", two, four, "--corpus", str(tmp_path / "few")]) == 0
    said = capsys.readouterr().out
    assert said.count("not known") == 9
    assert said.count("(no interval)") == 25
    assert "1 document(s) give no interval, expected 5 at least" in said
    assert "hold together" not in said


def test_comparing_with_a_checkpoint_that_is_not_finite(trained: Path, capsys, monkeypatch) -> None:
    load, calls = Training.load, []

    def broken(*given, **named):
        model = load(*given, **named)
        calls.append(given)
        if len(calls) == 2:
            model.layers["loop_0"].attention.wo.weight.data.view(-1)[0] = torch.nan
        return model

    monkeypatch.setattr(Training, "load", broken)
    two = str(checkpoint(trained, 2))
    assert main(["probe", "--compare", two, two]) == 0
    said = capsys.readouterr().out
    head, loop = (
        next(li for li in said.splitlines() if name in li) for name in ("head", "loop step 2, layer 1")
    )
    assert head.rstrip().endswith("no meaningful difference")
    assert "not finite" in loop
    assert said.rstrip().endswith("loss, nats per token: not finite  not known")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected one of CHECKPOINT"),
        (["{2}"], "--out is missing"),
        (["{2}", "--out", "{out}", "--seq-len", "1"], "--seq-len is 1"),
        (["{2}", "--out", "{out}", "--seq-len", "100000"], "longer than the model's context"),
        (["{2}", "--out", "{out}", "--corpus", "nope"], "there is no probe corpus 'nope'"),
        (["{2}/nowhere", "--out", "{out}"], "is not a checkpoint folder"),
        (["--series", "{out}"], "holds no checkpoint"),
    ],
)
def test_questions_that_are_wrong(trained: Path, tmp_path: Path, arguments, message: str, capsys) -> None:
    names = {"2": str(checkpoint(trained, 2)), "out": str(tmp_path / "out")}
    filled = [text.replace("{2}", names["2"]).replace("{out}", names["out"]) for text in arguments]
    assert main(["probe", *filled]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()

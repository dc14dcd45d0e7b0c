"""Checkpoints from before head and tail existed are probed through the legacy factory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from loopscope import open_run
from loopscope.cli import main
from loopscope.errors import ConfigError, ProbeError
from loopscope.probe.legacy import load_legacy

CODE = Path(__file__).with_name("legacy_code.py")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from legacy_code import OldModel

    torch.manual_seed(0)
    (tmp_path / "step-7").mkdir()
    torch.save(OldModel().state_dict(), tmp_path / "step-7" / "model.pt")
    return tmp_path / "step-7"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={sign: index for index, sign in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    (tmp_path / "tokenizer").mkdir()
    made.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({}))
    return tmp_path / "tokenizer"


def test_an_old_checkpoint_gives_rows(checkpoint: Path, tokenizer: Path, tmp_path: Path) -> None:
    flags = ["--legacy", f"{CODE}:load", "--layers", "2", "--tokenizer", str(tokenizer), "--seq-len", "32"]
    assert main(["probe", str(checkpoint), *flags, "--out", str(tmp_path / "out")]) == 0
    run = open_run(tmp_path / "out")
    rows = run.sql(
        "select block, unrolled_pos, loop_step, layer_idx, num_experts, top_k from probe_router order by 2"
    )
    assert rows.fetchall() == [("loop", pos, pos // 2, pos % 2, 5, 2) for pos in range(6)]
    assert run.sql("select count(*) from probe_overlap").fetchall() == [(6,)]
    assert run.sql(
        "select count(*) from probe_loss where loss_mean is null and num_target_tokens > 0"
    ).fetchall() == [(0,)]


def test_what_legacy_needs(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(checkpoint), "--legacy", f"{CODE}:load", "--out", str(tmp_path / "out")]) == 2
    assert "--legacy needs --layers, --tokenizer and --seq-len" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("load", ConfigError, "expected MODULE:FUNCTION"),
        (f"{CODE}:nothing", ConfigError, "has no function 'nothing'"),
        ("nowhere.py:load", ConfigError, "there is no file nowhere.py"),
        ("no_such_module:load", ConfigError, "cannot import no_such_module"),
        ("json:loads", ProbeError, "has no name TracePoint"),
        (f"{CODE}:wrong", ProbeError, "returned dict, expected a torch module"),
    ],
)
def test_code_that_does_not_fit(code: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        load_legacy(code, tmp_path, 2)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("def build(:\n", ConfigError, r"cannot import .*SyntaxError"),
        ("import nosuchmodule\n", ConfigError, r"cannot import .*nosuchmodule"),
        (
            "from loopscope.trace import TracePoint\ndef build(path):\n    raise RuntimeError('size mismatch')\n",
            ProbeError,
            r"failed on .*step-7 \(RuntimeError: size mismatch\)",
        ),
    ],
)
def test_old_code_that_fails(code: str, error: type[Exception], message: str, checkpoint: Path) -> None:
    (checkpoint.parent / "old.py").write_text(code)
    with pytest.raises(error, match=message):
        load_legacy(f"{checkpoint.parent / 'old.py'}:build", checkpoint, 2)


def test_a_stack_or_a_tokenizer_that_is_not_there(
    checkpoint: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "probe",
        str(checkpoint),
        "--legacy",
        f"{CODE}:load",
        "--seq-len",
        "32",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*flags, "--layers", "0", "--tokenizer", str(tokenizer)]) == 2
    assert "the stack has 0 layers" in capsys.readouterr().err
    assert main([*flags, "--layers", "2", "--tokenizer", str(tmp_path / "nope")]) == 2
    assert "there is no tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

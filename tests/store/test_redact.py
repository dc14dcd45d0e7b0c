"""Secrets in a configuration: what goes, what stays, and that it is said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from store_runs import QUIET, loss

from loopscope import open_run, open_runs
from loopscope.cli import main
from loopscope.store import RunStore, read_manifest
from loopscope.store.checksum import with_checksum
from loopscope.store.redact import REDACTED, redact, redact_text

S = "Xq7"
"""Stands in every secret here, and in nothing else."""

SECRETS: dict[str, Any] = {
    "hub_token": f"hf_{S}",
    "hubToken": f"{S}abc",
    "HF_TOKEN": f"{S}abc",
    "push_to_hub_token": f"{S}abc",
    "env": {"AWS_SECRET_ACCESS_KEY": f"AKIA{S}", "AWS_ACCESS_KEY_ID": S, "PGPASSWORD": S},
    "wandb": {"api_key": f"{S}0123", "apikey": S},
    "dataset": f"https://user:{S}pw@data.example/x.arrow",
    "database": f"postgres://me:{S}/w@h:5432/x",
    "redis": f"redis://:{S}@host/0",
    "sentry_dsn": f"https://{S}abc@o1.ingest.sentry.io/1",
    "signed": f"s3://b/x?part=1&X-Amz-Signature={S}",
    "azure": f"AccountName=x;AccountKey={S}==;EndpointSuffix=core",
    "slack": f"https://hooks.slack.com/services/T/B/{S}",
    "alerts_webhook": f"https://chat.example/{S}",
    "argv": ["train.py", "--hub-token", S, f"--token={S}", "--lr", "1"],
    "command": f"WANDB_API_KEY={S} python x.py --password {S} --out runs/x",
    "header": f"Authorization: Bearer {S}abcdefgh",
    "headers": {"Authorization": f"Basic {S}", "Cookie": S},
    "pairs": [["HF_TOKEN", S], {"name": "OPENAI_API_KEY", "value": S}],
    "auth": ["me", S],
    "secrets": {"a": S, "deep": [{"b": S}]},
    "repr": f"Config(hub_token='{S}', lr=1)",
    "as_json": json.dumps({"lr": 1, "client_secret": S}),
    "note": f"the key is sk-{S}abcdefgh and ghp_{S}abcdefgh",
    "jwt_in_text": f"sent eyJhbGciOiJI.eyJ{S}IiOiIx.SflKxw",
    "pem": f"-----BEGIN RSA PRIVATE KEY-----\n{S}\n-----END RSA PRIVATE KEY-----",
    "blob": "8f3K" + S + "mZp2Lw9vTQ4rB1cYdE5gHnJkM6sUxaR0oi",
    "storage_options": {"key": f"AKIA0{S.upper()}ABC", "secret": S},
    "trace": [[[{"password": S}]]],
}  # fmt: skip

KEPT: dict[str, Any] = {
    "pad_token": "<pad>",
    "eos_token": "EOS",
    "mask_token": "[MASK]",
    "tokens": ["<|a|>", "</s>"],
    "num_tokens": 5,
    "token": 17,
    "max_secrets": 3,
    "use_auth_token": True,
    "password": None,
    "api_key": "env:WANDB_API_KEY",
    "access_token": "${HF_TOKEN}",
    "api_key_env": "WANDB_API_KEY",
    "token_dispatcher": {"kind": "all_to_all"},
    "sort_key": "step",
    "credentials": "~/.aws/credentials",
    "author": "me",
    "auth": "oauth2",
    "first_pass": "head",
    "path": "/home/me/hf_models/token/x",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "hash": "sha256:" + "a1" * 32,
    "run": "01a22c23-688e-7866-bf49-5baad6f5753f",
    "url": "https://host:8080/a/user@revision",
    "git": "ssh://git@github.com/x/y",
    "model": "torchtitan.models.Qwen3MoeForCausalLMDecoderLayerV2",
    "prose": "task-force_x gets one token: the first",
    "webhook": "https://hooks.slack.com/***",
    "lr": 0.1,
    "dtype": "torch.bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_goes_by_its_name_or_its_shape(name: str) -> None:
    found = redact({"trainer": {name: SECRETS[name]}})
    assert S not in json.dumps(found.value)
    assert found.names
    assert all(said.startswith(f"trainer.{name}") for said in found.names)
    assert redact(found.value).names == ()


@pytest.mark.parametrize("name", KEPT)
def test_what_is_none_stays(name: str) -> None:
    assert redact({"trainer": {name: KEPT[name]}}) == ({"trainer": {name: KEPT[name]}}, ())


def test_numbers_that_are_passwords_go() -> None:
    assert redact({"password": 12345, "pin_memory": True, "db_password": True}).value == {
        "password": REDACTED,
        "pin_memory": True,
        "db_password": True,
    }


def test_only_the_secret_part_of_a_text_goes() -> None:
    assert redact_text("https://me:word@data.example/x.arrow") == f"https://{REDACTED}@data.example/x.arrow"
    assert redact_text("run --token=abc --lr 1") == f"run --token={REDACTED} --lr 1"


@pytest.mark.timeout(60)  # A second; hours where the time is not linear in the text's length.
def test_a_long_text_takes_no_time() -> None:
    for text in (
        "a",
        "a.",
        "a-",
        "://",
        "://a:b",
        "https://a",
        "token=",
        "token: ",
        "sk-",
        "eyJ-",
        "hf_",
        "a ",
        "A1b/",
        "bearer a",
    ):
        redact_text(text * 5_000)


class Opaque:
    def __str__(self) -> str:
        return f"Opaque(api_key='{S}')"


def make(root: Path, **configuration: Any) -> Path:
    with RunStore.create(root, configuration=configuration, options=QUIET) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        for step in range(1, 6):
            writer.append("loss", loss(step))
    return root


def test_no_file_of_a_run_and_no_answer_about_it_holds_one_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, logger="loopscope.store"):
        a = make(tmp_path / "a", trainer={**SECRETS, "opaque": Opaque(), "lr": 1})
    assert "configuration.trainer.HF_TOKEN" in caplog.text
    b = make(tmp_path / "b", trainer={"hub_token": "another", "lr": 2})
    for file in (file for file in a.rglob("*") if file.is_file()):
        assert S.encode() not in file.read_bytes(), file
    manifest = open_run(a).manifest
    assert "configuration.trainer.hub_token" in manifest.redacted
    assert "configuration.trainer.opaque" in manifest.redacted
    assert manifest.configuration["trainer"]["lr"] == 1
    ((told,),) = open_runs(tmp_path / "a").sql("select configuration from run").fetchall()
    assert S not in told
    assert main(["diff", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert S not in said
    assert "another" not in said
    assert "configuration.trainer.hub_token" in "".join(said.split())
    assert main(["summary", str(a)]) == 0
    assert S not in capsys.readouterr().out


def test_a_change_of_the_manifest_is_looked_at_too(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run", configuration={"a": 1}, options=QUIET) as store:
        store.update_manifest(configuration={"trainer": {"hub_token": S}})
        assert store.manifest.configuration == {"trainer": {"hub_token": REDACTED}}
    assert S not in (tmp_path / "run" / "run.json").read_text()
    assert read_manifest(tmp_path / "run").redacted == ["configuration.trainer.hub_token"]


def test_a_run_that_kept_them_is_read_without(tmp_path: Path) -> None:
    root = make(tmp_path / "run", trainer={"lr": 1})
    members = json.loads((root / "run.json").read_text())
    members.pop("checksum")
    members.pop("redacted")
    members["configuration"]["trainer"]["hub_token"] = S
    (root / "run.json").write_bytes(with_checksum(json.dumps(members).encode()))
    manifest = open_run(root).manifest
    assert S not in str(manifest)
    assert manifest.redacted == ["configuration.trainer.hub_token"]

"""What needs no torch must not import it: a reader of runs installs 320 MB, not 6 GB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_runs import Shape, generated_run

# What is refused is made unimportable, so that an import inside a function is caught as well. One process for all
# cases: what one of them has loaded hides no import of the next, since what is refused never gets loaded.
_ALL = """
import contextlib, io, json, sys, traceback
refused, codes = json.load(sys.stdin)
refused = set(refused)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
found = {}
for code in codes:
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(code, {"sys": sys})
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
    loaded = sorted(refused & set(sys.modules))
    found[code] = {"status": status, "out": out.getvalue(), "err": err.getvalue(), "loaded": loaded}
print(json.dumps(found))
"""

FRAMEWORKS = {"torchtitan", "transformers", "mlx", "mlx_lm", "nnsight"}
NOT_FOR_READERS = {"torch", "jaxtyping", "tokenizers", "datasets", "yaml", "wandb", "tensorboard"}
_MAIN = "from loopscope.cli import main; "
NEEDS_NOTHING = [
    "import loopscope; loopscope.__all__; loopscope.errors.ConfigError",
    "from loopscope import open_run",
    "import loopscope.store, loopscope.analysis, loopscope.probe",
    "from loopscope.probe import load_corpus; load_corpus('core')",
    "from loopscope.integrations.torchtitan import text; text.stdlib_files(10_000)",
    "import loopscope.cli.summary, loopscope.cli.train, loopscope.cli.torchrun",
    f"{_MAIN}assert main(['--help']) == 0",
    f"{_MAIN}assert main(['--version']) == 0",
    "import loopscope, loopscope.capture",
    "from loopscope.capture.registry import adapters; list(adapters()); [list(a) for a in adapters().values()]",
    f"{_MAIN}assert main(['support']) == 0",
    "from loopscope.capture import RunSettings as S, check_config as check; check(S(compile=True), 'sft', 'mlx')",
]
VERBS = ["train", "summary", "verify", "seal", "compact", "schemas"]
TOY = f"{_MAIN}sys.exit(main(['toy', '--out', 'x']))"


def _help(verb: str) -> str:
    return f"{_MAIN}main(['{verb}', '--help'])"


def _run(codes: list[str], refused: set[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _ALL], input=json.dumps([sorted(refused), codes]), capture_output=True, text=True,
        check=False, timeout=120, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def of_a_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What asks a run, by name."""
    shape = Shape(steps=1500, every=10, loops=2, layers=1)
    run = str(generated_run(tmp_path_factory.mktemp("imports") / "run", shape))
    count = "select count(*) from loss"
    return {
        "alerts": f"{_MAIN}assert main(['alerts', {run!r}]) == 0",
        "reading": f"from loopscope import open_run; r = open_run({run!r}); r.problems; "
        f"assert r.sql({count!r}).fetchall() == [(1500,)]",
    }


@pytest.fixture(scope="module")
def results(of_a_run: dict[str, str]) -> dict[str, Any]:
    codes = [*NEEDS_NOTHING, *map(_help, VERBS), TOY, *of_a_run.values()]
    return _run(codes, FRAMEWORKS | NOT_FOR_READERS)


@pytest.mark.parametrize("code", NEEDS_NOTHING)
def test_needs_no_torch_and_no_framework(code: str, results: dict[str, Any]) -> None:
    assert (results[code]["status"], results[code]["loaded"]) == (0, []), results[code]["err"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_needs_no_torch(verb: str, results: dict[str, Any]) -> None:
    done = results[_help(verb)]
    assert done["status"] == 0, done["err"]
    assert "--help" in done["out"]


@pytest.mark.parametrize("name", ["alerts", "reading"])
def test_what_asks_a_run_needs_no_torch(name: str, of_a_run: dict[str, str], results: dict[str, Any]) -> None:
    done = results[of_a_run[name]]
    assert (done["status"], done["loaded"]) == (0, []), done["err"]


def test_a_verb_that_needs_torch_says_what_to_install(results: dict[str, Any]) -> None:
    done = results[TOY]
    assert done["status"] == 2, done["err"]
    assert "pip install 'loopscope[train]'" in done["err"]
    assert "Traceback" not in done["err"]


# Named in a configuration, a tracker is looked for; what it needs is imported when it starts.
_TRACKERS = """
from loopscope import Loopscope
Loopscope.Config(out='nowhere', trackers=('wandb', 'tensorboard'))
assert not {'wandb', 'tensorboard'} & set(sys.modules)
"""
_ATTACHING = """
import pathlib
import torch
from torch.utils._python_dispatch import TorchDispatchMode
allocated = []
class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta":
            allocated.append(str(func))
        return out
sys.path.insert(0, 'tests/capture')
from capture_models import Recurrent, plan
from loopscope.capture import resolve_adapter, synthesize
from loopscope.capture.requirements import requirements_by_metric
import loopscope
with torch.device("meta"):
    model = Recurrent()
with Watch():
    adapter = resolve_adapter("pretrain", "torch")(model, overrides=plan())
    synthesize(requirements_by_metric(), adapter.backend_support())
    loopscope.attach(model, out="nowhere", plan=plan())
assert not allocated, allocated
assert not pathlib.Path("nowhere").exists()
assert not any(part._forward_hooks for part in model.modules())
"""


@pytest.fixture(scope="module")
def with_torch() -> dict[str, Any]:
    return _run([_TRACKERS, _ATTACHING], FRAMEWORKS)


def test_no_tracker_is_imported_before_it_is_started(with_torch: dict[str, Any]) -> None:
    assert with_torch[_TRACKERS]["status"] == 0, with_torch[_TRACKERS]["err"]


def test_planning_capabilities_and_attach_itself_allocate_nothing(with_torch: dict[str, Any]) -> None:
    assert with_torch[_ATTACHING]["status"] == 0, with_torch[_ATTACHING]["err"]

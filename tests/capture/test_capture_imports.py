"""What capture may not load or do before something is attached."""

from __future__ import annotations

import subprocess
import sys

import pytest

_GUARD = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def run(code: str, refused: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _GUARD.format(refused=refused) + code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


FRAMEWORKS = {"torchtitan", "transformers", "mlx", "mlx_lm", "nnsight"}


@pytest.mark.parametrize(
    "code",
    [
        "import loopscope, loopscope.capture",
        "from loopscope.capture.registry import adapters; list(adapters()); [list(a) for a in adapters().values()]",
        "from loopscope.cli import main; assert main(['support']) == 0",
        "from loopscope.capture import RunSettings as S, check_config as check; check(S(compile=True), 'sft', 'mlx')",
    ],
)
def test_needs_neither_torch_nor_a_framework(code: str) -> None:
    run(code, FRAMEWORKS | {"torch", "jaxtyping", "yaml"})


_COUNTED = """
import torch
allocated = []
from torch.utils._python_dispatch import TorchDispatchMode
class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta":
            allocated.append(str(func))
        return out
"""


def test_planning_capabilities_and_attach_itself_allocate_nothing() -> None:
    code = """
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
import pathlib
assert not allocated, allocated
assert not pathlib.Path("nowhere").exists()
assert not any(part._forward_hooks for part in model.modules())
"""
    run(_COUNTED + code, FRAMEWORKS)

"""Lets torchtitan 0.3 run on CPU with gloo. On a machine with an accelerator it changes nothing.

Import it, and call `enable()`, before any other torchtitan module: torchtitan reads the device type while its
modules are imported. Each remedy names the place that needs it.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

# What torchtitan asks of `torch.cuda`, answered for a CPU: one device for every rank, whatever LOCAL_RANK says, whose
# work is synchronous. Without memory statistics torchtitan prints -1 instead of a number nobody measured. The name
# also selects its table of peak FLOPS, where "cpu" is unknown.
_CPU_DEVICE = SimpleNamespace(
    __name__="torch.cpu",
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    synchronize=lambda device=None: None,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: SimpleNamespace(
        total_memory=max(1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    ),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda device=None: None,
    empty_cache=lambda: None,
)


def enable() -> bool:
    """Apply the remedies where they are needed; idempotent. Returns whether they are in force."""
    if torch.accelerator.is_available():
        return False
    _stub_triton_where_absent()
    from torchtitan.tools import utils

    if utils.device_type != "cpu":
        # torchtitan/tools/utils.py falls back to "cuda" where it finds no accelerator.
        utils.device_type = "cpu"
        utils.device_module = _CPU_DEVICE
    return True


def prepare_fsdp(model: torch.nn.Module) -> None:
    """Make FSDP's gradient reduction a plain sum.

    torchtitan sets the gradient divide factor to 1.0, which becomes PREMUL_SUM, and gloo refuses that; a plain
    SUM is the same number.
    """
    if torch.accelerator.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def init_like_unsharded(init: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    """Make a random initialiser give a sharded parameter the values it would give the whole one.

    DTensor keeps ranks' random streams apart with a tracker that exists for accelerators only. On a CPU mesh
    every rank draws the same numbers into its own shard, so expert 0 of one rank is a copy of expert 0 of the
    other, gate row and all: half the experts, each twice, and routers with exactly tied logits. Here each rank
    draws the whole parameter from the same stream and keeps its shard, whatever the number of ranks.
    """

    def initialise(parameter: torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(parameter, DTensor) or parameter.device.type != "cpu":
            init(parameter)
            return
        init(whole := torch.empty(parameter.shape, dtype=parameter.dtype))
        # Every rank holds the whole already; src_data_rank=None slices it without communication.
        parameter.copy_(
            distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        )

    return initialise


def _stub_triton_where_absent() -> None:
    # torchtitan/distributed/minimal_async_ep/kernels.py imports triton unconditionally.
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return

    class _Stub(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "jit":
                return lambda fn=None, **_: fn if fn is not None else (lambda inner: inner)
            return object

    triton, language = _Stub("triton"), _Stub("triton.language")
    triton.__dict__["language"] = language
    sys.modules["triton"], sys.modules["triton.language"] = triton, language

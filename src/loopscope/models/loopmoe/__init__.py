"""The reference looped MoE as a torchtitan model.

`model_registry(flavor)` gives torchtitan's ModelSpec; the flavours are in `FLAVORS`.
"""

# torchtitan reads the device type while it is imported, so this must come first.
from loopscope.models import cpu_compat

cpu_compat.enable()

from loopscope.models.loopmoe.block import load_balancing_loss, router_z_loss  # noqa: E402
from loopscope.models.loopmoe.flavors import FLAVORS, LoopMoEShape, build_config, model_registry  # noqa: E402
from loopscope.models.loopmoe.model import LoopMoEModel, LoopMoEOutput  # noqa: E402
from loopscope.models.loopmoe.parallelize import parallelize_loopmoe  # noqa: E402

__all__ = [
    "FLAVORS",
    "LoopMoEModel",
    "LoopMoEOutput",
    "LoopMoEShape",
    "build_config",
    "load_balancing_loss",
    "model_registry",
    "parallelize_loopmoe",
    "router_z_loss",
]

"""A model by name: without a number in it, on torch's meta device, or to be run."""

import pkgutil
import sys
from pathlib import Path
from typing import Any

from loopscope.errors import ConfigError


def build_model(text: str, backend: str, *, device: str = "meta") -> Any:
    """Build the model that `text` names; on the meta device, so that nothing is allocated, unless told otherwise.

    Args:
        text: ``package.module:function``, a function without arguments that returns the model; or, for
            transformers, the path of a ``config.json``.
        backend: what runs the model.
        device: "meta", or where the model is to be run.

    Raises:
        ConfigError: the name cannot be resolved, or building fails.
    """
    import torch

    path = Path(text)
    with torch.device(device):
        if backend == "transformers" and path.suffix == ".json":
            return _from_json(path)
        if ":" not in text:
            raise ConfigError(
                f"model is {text!r}, expected 'package.module:function'"
                + (" or the path of a config.json." if backend == "transformers" else ".")
            )
        return _named(text, "model")()


def build_batch(text: str) -> Any:
    """What `text` names, called: ``package.module:function`` gives a mapping, a tuple or a tensor for one forward.

    Raises:
        ConfigError: the name cannot be resolved.
    """
    if ":" not in text:
        raise ConfigError(f"batch is {text!r}, expected 'package.module:function'.")
    return _named(text, "batch")()


def _named(text: str, what: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module beside the user, as `python -m` would find it
    try:
        return pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} {text!r} cannot be imported: {error}.") from None


def _from_json(path: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a transformers configuration: {error}") from None
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]

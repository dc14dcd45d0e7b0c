"""What a transformers output says of the objective."""

from collections.abc import Mapping
from typing import Any

import torch

from loopscope.capture.adapter import LossParts


def loss_parts(
    model: Any, config: Any, factor_name: str | None, top_k: int, kwargs: Mapping[str, Any], output: Any
) -> LossParts | None:
    """Loss and auxiliary loss of one forward's output; transformers' auxiliary loss is k times loopscope's.

    Args:
        model: holds the auxiliary loss's factor, as it was when the model was made; else the configuration does.
        config: of the backbone.
        factor_name: attribute with that factor; None where the model adds no auxiliary loss to its loss.
        top_k: experts that each token is sent to.
        kwargs: of the forward.
        output: of the forward.
    """
    total = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(total, torch.Tensor):
        return None
    aux = getattr(output, "aux_loss", None)
    balancing = aux.detach() if factor_name is not None and isinstance(aux, torch.Tensor) else None
    factor = 0.0
    if balancing is not None and factor_name is not None:
        known = getattr(model, factor_name, None)
        factor = float(getattr(config, factor_name) if known is None else known)
    return LossParts(
        total.detach(),
        None if balancing is None else balancing / top_k,
        factor * top_k,
        kwargs.get("num_items_in_batch") is not None,
    )

"""Old checkpoints' own model code, which builds TracePoints as they were before head and tail existed."""

from typing import Any

from loopscope.trace.point import ROUTER_FIELDS, TracePoint, unrolled_position

_COORDINATES = ("loop_step", "layer_idx")
_REQUIRED = (*_COORDINATES, *ROUTER_FIELDS, "residual")
_OPTIONAL = ("score_func", "selection_scores", "expert_bias")


class LegacyTracePointFactory:
    """Stands in for `TracePoint` in code that knows only a loop; see `legacy_trace_point_factory`."""

    __slots__ = ("_num_layers_in_stack", "_real")

    def __init__(self, num_layers_in_stack: int) -> None:
        unrolled_position(0, 0, num_layers_in_stack)  # refuses a stack of no layers, at once
        self._num_layers_in_stack = num_layers_in_stack
        # Bound now: the stand-in gets installed under the class's own name, so a look-up at call time
        # would find the stand-in itself.
        self._real = TracePoint

    def __call__(self, **fields: Any) -> TracePoint:
        """Build a TracePoint from the old keywords.

        Raises:
            ValueError: a keyword is missing or unknown, or an index is out of range.
        """
        if "block" in fields:  # new code that reached the stand-in while it was installed
            return self._real(**fields)
        self._check(fields)
        dense = fields["router_logits"] is None
        return self._real(
            block="loop",
            unrolled_pos=unrolled_position(
                fields["loop_step"], fields["layer_idx"], self._num_layers_in_stack
            ),
            num_experts=0 if dense else int(fields["router_logits"].shape[-1]),
            top_k=0 if dense else int(fields["topk_idx"].shape[-1]),
            **fields,
        )

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._real)

    def _check(self, fields: dict[str, Any]) -> None:
        missing = [name for name in _REQUIRED if name not in fields]
        absent = [name for name in ROUTER_FIELDS if fields.get(name) is None]
        if len(absent) < len(ROUTER_FIELDS):  # only a dense layer has none of the four
            missing += [name for name in absent if name not in missing]
        missing += [name for name in (*_COORDINATES, "residual") if name in fields and fields[name] is None]
        if missing:
            raise ValueError(
                f"an old-style TracePoint lacks {', '.join(missing)}; expected the keywords "
                f"{', '.join(_REQUIRED)} (a dense layer sets the four router tensors to None together)"
            )
        unknown = sorted(set(fields) - {*_REQUIRED, *_OPTIONAL})
        if unknown:
            raise ValueError(
                f"an old-style TracePoint got {', '.join(unknown)}; expected only "
                f"{', '.join((*_REQUIRED, *_OPTIONAL))}: block, depth, E and k are filled in by the factory"
            )


def legacy_trace_point_factory(num_layers_in_stack: int) -> LegacyTracePointFactory:
    """A stand-in for the TracePoint class, for checkpoints from before head and tail existed.

    Such code builds ``TracePoint(loop_step=, layer_idx=, <tensors>)``. The stand-in accepts those keywords
    and fills ``block="loop"``, `unrolled_pos` (the loop starts at 0), `num_experts` (last dimension of
    `router_logits`) and `top_k` (last dimension of `topk_idx`). Install it under the class's name in the old
    module: ``old_module.TracePoint = legacy_trace_point_factory(num_layers_in_stack=4)``; ``isinstance``
    against it answers for the real class.

    Args:
        num_layers_in_stack: L, the physical layers of the checkpoint's shared stack.

    Raises:
        ValueError: the stack size is < 1; when called, a keyword is missing (named) or unknown.
    """
    return LegacyTracePointFactory(num_layers_in_stack)

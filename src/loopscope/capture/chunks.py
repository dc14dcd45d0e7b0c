"""Whether the calls of a block see all tokens of a forward, or each a part of them."""

from collections.abc import Mapping, Sequence
from typing import Any

_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "hidden_states")
"""Arguments that hold one entry per token, where a forward has one of these names."""


def tokens_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Tokens that a forward was given: B*S of ids [B, S] or vectors [B, S, d].

    The argument of a usual name, else the first one of such a shape; None where there is none.
    """
    named = [kwargs[name] for name in _TOKENS if kwargs.get(name) is not None]
    return next(
        (count for value in (*named, *args, *kwargs.values()) if (count := _tokens(value)) is not None), None
    )


def in_chunks(tokens: Sequence[int], given: int | None) -> bool:
    """True where calls that each saw fewer tokens than the forward was given, together saw all of them, once or more.

    Args:
        tokens: of each call.
        given: of the forward; None where that is not known.
    """
    if given is None or len(tokens) < 2 or max(tokens) >= given:
        return False
    return sum(tokens) % given == 0


def _tokens(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    is_float = getattr(value, "is_floating_point", None)
    if shape is None or is_float is None or len(shape) not in (2, 3) or getattr(value, "is_nested", False):
        return None
    return int(shape[0] * shape[1]) if len(shape) == (3 if is_float() else 2) else None

"""Where a forward's padding is said: the mask of the innermost module around a block that was given one."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from loopscope.capture.masks import FIX, MaskError, is_causal, key_validity, takes_part, valid_lengths
from loopscope.trace import TracePoint

_NOT_OF_PADDING = (
    "loss", "label", "target", "tgt", "head", "cross", "image", "pixel", "vision", "causal", "pos", "type", "mlm",
    "memory", "router", "output", "encoder",
)  # fmt: skip
"""An argument whose name has "mask" and one of these in it says nothing of the padding of a block's tokens."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What one call of a module was given that may say padding."""

    module: str
    is_pair: bool
    """The module holds an encoder and a decoder, and is given a mask of each."""
    given: Mapping[str, Any]


class PaddingReader:
    """Finds [B, S] of tokens that are no padding for each visit of one forward.

    Known by name, given by keyword, by position or within a mapping:

    - ``attention_mask``: true, or 0 where it is added to the scores, for tokens that take part;
    - ``...key_padding_mask``: torch's, true, or -inf where it is added, for padding;
    - ``padding_mask``: true for padding, and refused where the ids beside it say otherwise;
    - ``cu_seqlens`` and ``cu_seq_lens_q``: ends of packed sequences.

    Any other mask that could hold padding is refused.
    """

    def __init__(self) -> None:
        self._latest: dict[str, _Told] = {}
        self._calls: dict[str, list[tuple[list[_Told], _Told]]] = {}

    @contextmanager
    def listening(self, modules: Mapping[str, nn.Module], blocks: Iterable[str]) -> Iterator[None]:
        """Note what the blocks and the modules around them are given while the body runs."""
        self.clear()
        blocks = set(blocks)
        around = {parent for block in blocks for parent in _parents(block)}
        with ExitStack() as stack:
            for name in sorted((around | blocks) - {""}):
                hook = self._hook(name, name in blocks)
                stack.callback(modules[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def valid(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        points: Sequence[TracePoint],
        blocks: Sequence[str],
    ) -> Any:
        """[B, S] bool; by `unrolled_pos` where visits differ in theirs. None where nothing says padding.

        Args:
            root: the model.
            args: of its forward.
            kwargs: of its forward.
            points: the visits in call order.
            blocks: the module of each.

        Raises:
            MaskError: there is a mask that cannot be read, or does not fit.
        """
        outermost = _told("", root, args, kwargs)
        calls = {block: iter(told) for block, told in self._calls.items()}
        known: dict[tuple[int, int, int], Tensor | None] = {}
        found: dict[int, Tensor | None] = {}
        for point, block in zip(points, blocks, strict=True):
            batch, length = point.residual.shape[:2]
            around, own = next(calls.get(block, iter(())), ([], None))
            # What a block itself is given was made from what came in from outside: asked last.
            order = [*around, outermost, *([own] if own is not None else [])]
            found[point.unrolled_pos] = _first(block, order, (batch, length), known)
        self.clear()
        masks = list(found.values())
        return masks[0] if masks and all(mask is masks[0] for mask in masks) else found

    def clear(self) -> None:
        """Let go of every argument."""
        self._latest.clear()
        self._calls.clear()

    def _hook(self, name: str, is_block: bool) -> Callable[..., None]:
        parents = _parents(name)

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            own = self._latest[name] = _told(name, module, args, kwargs)
            if is_block:
                around = [self._latest[parent] for parent in parents if parent in self._latest]
                self._calls.setdefault(name, []).append((around, own))

        return note


def _told(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Told:
    parameters = _parameters(type(module).forward)
    named = {**dict(zip(parameters[1:], args, strict=False)), **kwargs}
    for value in list(named.values()):
        if isinstance(value, Mapping):
            named = {**{key: part for key, part in value.items() if isinstance(key, str)}, **named}
    given = {
        key: value
        for key, value in named.items()
        if value is not None and ("mask" in key or key.startswith("cu_seq") or _is_ids(value))
    }
    return _Told(name, "decoder_attention_mask" in parameters, given)


@lru_cache(maxsize=512)
def _parameters(forward: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # built in, or no function at all
        return ()


def _first(
    block: str,
    order: Sequence[_Told],
    shape: tuple[int, int],
    known: dict[tuple[int, int, int], Tensor | None],
) -> Tensor | None:
    """From the first call that says padding in a mask that fits."""
    unfit: MaskError | None = None
    ids = [value for told in order for value in told.given.values() if _is_ids(value)]
    for told in order:
        for name in _names(told, block):
            value = told.given[name]
            key = (id(value), *shape)
            try:
                if key not in known:
                    known[key] = _read(name, value, ids, shape)
            except MaskError as error:
                unfit = unfit or error
                continue
            if known[key] is not None:
                return known[key]
    if unfit is not None:
        raise unfit
    return None


def _names(told: _Told, block: str) -> list[str]:
    """The arguments of one call that say padding of `block`, the surest first."""
    given = told.given
    if told.is_pair and any(part.startswith("decoder") for part in block.split(".")):
        return [
            name for name in ("decoder_attention_mask",) if name in given
        ]  # the other one is the encoder's
    known = [name for name in given if name.endswith("padding_mask")]
    known = [name for name in ("attention_mask", *known, "cu_seqlens", "cu_seq_lens_q") if name in given]
    odd = [name for name in given if "mask" in name and not name.endswith(("padding_mask", "attention_mask"))]
    return known + [name for name in odd if not any(word in name for word in _NOT_OF_PADDING)]


def _read(name: str, value: Any, ids: Sequence[Tensor], shape: tuple[int, int]) -> Tensor | None:
    if name.startswith("cu_seq"):
        return valid_lengths(value, shape)
    if name.endswith("attention_mask"):
        return key_validity(value, shape, name)
    if not name.endswith("padding_mask"):
        _refuse_padding(name, value, shape)
        return None
    if not isinstance(value, Tensor) or value.is_floating_point():
        return key_validity(value, shape, name)
    valid = key_validity(value == 0, shape, name)
    if not name.endswith("key_padding_mask") and valid is not None:
        _check_against_ids(name, valid, ids)
    return valid


def _check_against_ids(name: str, valid: Tensor, ids: Sequence[Tensor]) -> None:
    """Padding is one id. Where what would be padding has several, the mask means the opposite."""
    padded = [each[~valid.to(each.device)] for each in ids if each.shape == valid.shape]
    if bool(valid.any()) and all(bool((each == each[:1]).all()) for each in padded[:1]):
        return
    raise MaskError(
        f"{name} is true where tokens differ; expected it to be true for padding. Call it attention_mask if it is true "
        f"for tokens that take part. {FIX}"
    )


def _refuse_padding(name: str, value: Any, shape: tuple[int, int]) -> None:
    """Raise where a mask holds padding, whichever way round it is meant."""
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[-1] != shape[1]:
        return
    if value.shape[0] != shape[0] and value.numel() != shape[0] * shape[1]:
        return
    readings = [takes_part(value)] if value.is_floating_point() else [value != 0, value == 0]
    if value.ndim == 2 and any(is_causal(reading) for reading in readings):
        return
    seen = [key_validity(reading, shape, name) for reading in readings]
    if not any(valid is None or bool(valid.all()) for valid in seen):
        raise MaskError(
            f"the forward is given {name!r} {list(value.shape)}, and what it is true for is not known. {FIX}"
        )


def _is_ids(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.ndim != 2:
        return False
    return not (value.is_floating_point() or value.is_complex() or value.element_size() == 1)


def _parents(name: str) -> list[str]:
    """Modules around `name`, innermost first, without the model itself."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]

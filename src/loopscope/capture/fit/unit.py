"""From experts to the router before them: copies of the module that calls them are run, and what they do explained."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor, nn

from loopscope.capture.fit.calls_experts import Unit
from loopscope.capture.fit.places import places_of
from loopscope.capture.fit.random_copy import random_copy
from loopscope.capture.fit.routing_fit import Fit, Look, fits
from loopscope.capture.fit.trial import PassThrough, Stub, Trial, run_trial
from loopscope.trace.isolation_rng import save_random_streams

BATCH, SEQ = 3, 17
_SETTINGS = ((1.0, 0.3, True), (2.0, 0.02, True), (1.0, 1.0, True), (1.0, 0.3, False), (300.0, 0.3, True))
"""Of each trial: gain of matrices, size of vectors, training mode. The last one rounds scores to 0 and 1."""


@dataclass(slots=True)
class Found:
    """What was found out about a unit."""

    fits: list[Fit] = field(default_factory=list)
    gate_bias: bool = False
    routes: bool = False
    """True where something routes here, whether or not it was understood."""
    why: str = ""
    """Why there is no fit, or what the fits leave open."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How to call a copy of a unit."""

    passing: bool
    """Everything but experts and routers passes its input through."""
    width: int
    """Size of the hidden state."""
    ids: bool
    """Token ids are given where the forward has a parameter for them."""
    seen: bool = False
    """Called as it was seen to be called, with other numbers."""


def examine(unit: Unit, widths: Sequence[int]) -> Found:
    """Run copies of `unit` and describe its routing; the unit itself is not run, and no random stream moves.

    Args:
        unit: the module that calls the experts.
        widths: sizes of the hidden state to try, most likely first.
    """
    with _streams_kept(unit.module):
        way, why = _first_way(unit, widths)
        if way is None:
            return Found(why=why)
        looks = _trials(unit, way)
        places, why = places_of(unit, [look.trial for look in looks], _tokens(unit, way))
        if places is None:
            return Found(routes=bool(why), why=why)
        groups = _groupings(unit.module)
        found = fits(looks, places, groups)
        if len(found) > 1:
            larger = replace(places, top_k=places.top_k + 1)
            found = _settled(found, fits(_with_larger_k(unit, way, places.top_k), larger, groups))
        if len(found) == 1:
            zero = _one(unit, way, 0, zero=True).read(found[0].tensors["router_logits"])
            return Found(found, routes=True, gate_bias=bool(zero.abs().max() > 0))
    if not found:
        return Found(
            routes=True, why="no description of routing explains what a copy with random weights does"
        )
    several = "; ".join(str(fit) for fit in found)
    return Found(found, routes=True, why=f"{len(found)} descriptions explain it equally well: {several}")


@contextmanager
def _streams_kept(module: nn.Module) -> Iterator[None]:
    restores = save_random_streams(module)
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _first_way(unit: Unit, widths: Sequence[int]) -> tuple[_Way | None, str]:
    """The first way in which a copy runs as far as its experts; else why none does."""
    ways = [
        _Way(passing, width, ids) for passing, width, ids in product((False, True), widths, (False, True))
    ]
    if unit.call is not None:
        ways = [_Way(passing, 0, ids=False, seen=True) for passing in (False, True)]
    why = ""
    for way in ways:
        trial = _one(unit, way, 0)
        # What a forward does behind its experts need not run.
        if any(unit.enters(key) for key in trial.values):
            return way, ""
        if not why or way.passing:
            why = f"a copy of it does not get as far as its experts ({trial.error or 'they are not called'})"
    return None, why


def _tokens(unit: Unit, way: _Way) -> int:
    if not way.seen:
        return BATCH * SEQ
    hidden = unit.hidden()
    return hidden.numel() // hidden.shape[-1]


def _trials(unit: Unit, way: _Way, ints: Mapping[int, int] | None = None) -> list[Look]:
    last = len(_SETTINGS) - 1
    return [Look(_one(unit, way, number, ints=ints), saturated=number == last) for number in range(last + 1)]


def _with_larger_k(unit: Unit, way: _Way, top_k: int) -> list[Look]:
    """Trials of copies whose integers of k are k + 1: with k = 1, normalised weights are 1 and tell nothing."""
    looks = _trials(unit, way, {top_k: top_k + 1})
    return [] if any(look.trial.error for look in looks) else looks


def _settled(found: list[Fit], larger: list[Fit]) -> list[Fit]:
    """Those of `found` that explain a larger k as well; all of them where that experiment told nothing."""
    also = {str(fit) for fit in larger}
    return [fit for fit in found if str(fit) in also] or found


def _one(
    unit: Unit, way: _Way, number: int, *, ints: Mapping[int, int] | None = None, zero: bool = False
) -> Trial:
    gain, bias, training = _SETTINGS[number]
    generator = torch.Generator().manual_seed(number)
    stubs: dict[int, nn.Module] = {id(module): Stub() for module in unit.called_as_experts()}
    if way.passing:
        stubs |= {
            id(child): PassThrough()
            for name, child in unit.module.named_children()
            if name not in unit.experts and not _may_route(child, unit.experts.values())
        }
    copy = random_copy(
        unit.module,
        generator,
        gain=gain,
        bias=bias,
        stubs=stubs,
        ints=ints,
        experts=max(unit.experts.values()),
    )
    for module in copy.modules():
        module.training = training
    with torch.device("cpu"):
        if way.seen:
            return run_trial(copy, *unit.other_numbers(generator, zero=zero))
        hidden = torch.randn(BATCH, SEQ, way.width, generator=generator)
        kwargs = _token_ids(unit.module, generator) if way.ids else {}
        return run_trial(copy, (hidden * 0 if zero else hidden,), kwargs)


def _token_ids(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    names = [name for name in _parameters(module) if name.endswith("ids")]
    return {name: torch.randint(16, (BATCH, SEQ), generator=generator) for name in names}


def _parameters(module: nn.Module) -> list[str]:
    code = getattr(type(module).forward, "__code__", None)
    return [] if code is None else list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


def _may_route(module: nn.Module, sizes: Iterable[int]) -> bool:
    """True where a matrix has one dimension of as many as there are experts."""
    wanted = set(sizes)
    return any(tensor.ndim == 2 and wanted & set(tensor.shape) for tensor in module.parameters())


def _groupings(module: nn.Module) -> list[tuple[int, int]]:
    """(groups, groups a token may choose from) among the integers that the unit's modules hold."""
    numbers: set[int] = set()
    for part in module.modules():
        numbers |= {value for value in vars(part).values() if type(value) is int and 0 < value <= 256}
    return [(many, few) for many in sorted(numbers) for few in sorted(numbers) if few < many]

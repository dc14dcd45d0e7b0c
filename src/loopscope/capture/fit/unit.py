"""From experts to the router before them: what to copy, what reaches the experts, what explains it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor, nn

from loopscope.capture.fit.random_copy import random_copy
from loopscope.capture.fit.routing_fit import Fit, Places, Look, fits, same_values
from loopscope.capture.fit.trial import Key, PassThrough, Stub, Trial, run_trial
from loopscope.trace.isolation_rng import save_random_streams

BATCH, SEQ = 3, 17
_TOKENS = BATCH * SEQ
_SETTINGS = ((1.0, 0.3, True), (2.0, 0.02, True), (1.0, 1.0, True), (1.0, 0.3, False), (300.0, 0.3, True))
"""Of each trial: gain of matrices, size of vectors, training mode. The last one rounds scores to 0 and 1."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that calls experts."""

    name: str
    module: nn.Module
    experts: Mapping[str, int]
    """Name of each candidate within the module → number of experts."""


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


def examine(unit: Unit, widths: Sequence[int]) -> Found:
    """Run copies of `unit` and describe its routing; the unit itself is not run, and no random stream moves.

    Args:
        unit: the module that calls the experts.
        widths: sizes of the hidden state to try, most likely first.
    """
    with _streams_kept(unit.module):
        way, first, why = _first_way(unit, widths)
        if way is None or first is None:
            return Found(why=why)
        places, why = _places(unit, first)
        if places is None:
            return Found(routes=bool(why), why=why)
        looks = _trials(unit, way)
        groups = _groupings(unit.module)
        found = fits(looks, places, groups)
        if len(found) > 1:
            found = _settled(
                found, fits(_with_larger_k(unit, way, first.read(places.idx).shape[-1]), places, groups)
            )
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


def _first_way(unit: Unit, widths: Sequence[int]) -> tuple[_Way | None, Trial | None, str]:
    """The first way in which a copy runs and calls experts, and that run; else why the first one failed."""
    why = ""
    for passing, width, ids in product((False, True), widths, (False, True)):
        way = _Way(passing, width, ids)
        trial = _one(unit, way, 0)
        # What a forward does behind its experts need not run.
        if any(key[0] in unit.experts and key[1].startswith(("input", "kwarg")) for key in trial.values):
            return way, trial, ""
        if not why or passing:
            why = f"a copy of it does not get as far as its experts ({trial.error or 'they are not called'})"
    return None, None, why


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
    stubs: dict[int, nn.Module] = {id(unit.module.get_submodule(name)): Stub() for name in unit.experts}
    if way.passing:
        stubs |= {
            id(child): PassThrough()
            for name, child in unit.module.named_children()
            if name not in unit.experts and not _may_route(child, unit.experts.values())
        }
    copy = random_copy(unit.module, generator, gain=gain, bias=bias, stubs=stubs, ints=ints)
    for module in copy.modules():
        module.training = training
    hidden = torch.randn(BATCH, SEQ, way.width, generator=generator)
    kwargs = _token_ids(unit.module, generator) if way.ids else {}
    with torch.device("cpu"):
        return run_trial(copy, (hidden * 0 if zero else hidden,), kwargs)


def _token_ids(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    names = [name for name in _parameters(module) if name.endswith("ids")]
    return {name: torch.randint(2, (BATCH, SEQ), generator=generator) for name in names}


def _parameters(module: nn.Module) -> list[str]:
    code = getattr(type(module).forward, "__code__", None)
    return [] if code is None else list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


def _may_route(module: nn.Module, sizes: Iterable[int]) -> bool:
    """True where a matrix has one dimension of as many as there are experts."""
    wanted = set(sizes)
    return any(tensor.ndim == 2 and wanted & set(tensor.shape) for tensor in module.parameters())


def _places(unit: Unit, trial: Trial) -> tuple[Places | None, str]:
    """Where indices, weights, logits and biases may be; with "" where nothing routes here at all."""
    at_experts = [key for key in trial.values if key[0] in unit.experts and not key[1].startswith("module")]
    least = max(unit.experts.values())
    rows = {key: value for key, value in trial.values.items() if _per_token(value)}
    chosen = next((key for key in at_experts if key in rows and _is_index(rows[key], least)), None)
    if chosen is None:
        scored = any(
            value.shape[-1] in unit.experts.values() for key, value in rows.items() if key[1] != "input[0]"
        )
        return None, "no indices reach the experts: the choice of experts cannot be named" if scored else ""
    top_k = rows[chosen].shape[-1]
    idx = _origin(chosen, rows, unit)
    weights = next(
        (
            _origin(key, rows, unit)
            for key in at_experts
            if key in rows and rows[key].is_floating_point() and rows[key].shape[-1] == top_k
        ),
        None,
    )
    size = max(least, int(rows[chosen].max()) + 1)
    logits = [
        key
        for key, value in rows.items()
        if key[1].startswith("output") and value.is_floating_point() and value.shape[-1] >= size
        and key[0] not in unit.experts and value.shape[-1] <= 2 * least + 8
    ]  # fmt: skip
    # What the router itself returns comes first, then what runs inside it, then the rest of the unit.
    router = idx[0]
    logits.sort(key=lambda key: (key[0] != router, not key[0].startswith(f"{router}."), key[0].count(".")))
    if not logits:
        return None, "no scores over all experts cross a module boundary"
    sizes = {rows[key].shape[-1] for key in logits}
    biases = _distinct_vectors(trial, sizes, router, unit)
    return Places(tuple(logits), idx, weights, biases), ""


def _per_token(value: Tensor) -> bool:
    return value.ndim >= 2 and value.shape[-1] > 0 and value.numel() == _TOKENS * value.shape[-1]


def _is_index(value: Tensor, num_experts: int) -> bool:
    whole = value.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
    return whole and value.shape[-1] <= num_experts and int(value.min()) >= 0


def _origin(key: Key, rows: Mapping[Key, Tensor], unit: Unit) -> Key:
    """The output of the outermost module that gave this very value, or the experts' input itself."""
    given = [
        other
        for other, value in rows.items()
        if other[0]
        and other[1].startswith("output")
        and other[0] not in unit.experts
        and value.dtype == rows[key].dtype
        and value.shape[-1] == rows[key].shape[-1]
        and same_values(value, rows[key])
    ]
    return min(given, key=lambda other: other[0].count("."), default=key)


def _distinct_vectors(trial: Trial, sizes: set[int], router: str, unit: Unit) -> tuple[Key, ...]:
    """Vectors with one number per expert, each once, named from the router where it has them."""
    found: dict[tuple[float, ...], Key] = {}
    keys = sorted(trial.values, key=lambda key: (key[0] != router, key[0] != "", key[0]))
    for key in keys:
        value = trial.values[key]
        if (
            value.ndim == 1
            and value.shape[0] in sizes
            and value.is_floating_point()
            and key[0] not in unit.experts
        ):
            found.setdefault(tuple(value.tolist()), key)
    return tuple(found.values())


def _groupings(module: nn.Module) -> list[tuple[int, int]]:
    """(groups, groups a token may choose from) among the integers that the unit's modules hold."""
    numbers: set[int] = set()
    for part in module.modules():
        numbers |= {value for value in vars(part).values() if type(value) is int and 0 < value <= 256}
    return [(many, few) for many in sorted(numbers) for few in sorted(numbers) if few < many]

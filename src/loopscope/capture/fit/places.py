"""Where indices, weights, logits and biases of a routing may be, from what crossed the boundaries in trials."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loopscope.capture.fit.calls_experts import Unit
from loopscope.capture.fit.routing_fit import Places, same_values
from loopscope.capture.fit.trial import Key, Trial

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)


def places_of(unit: Unit, trials: Sequence[Trial], tokens: int) -> tuple[Places | None, str]:
    """The places, or why there are none; "" where nothing routes here at all.

    Args:
        unit: what was run.
        trials: its runs, the first with moderate numbers.
        tokens: tokens of each run.
    """
    first = trials[0]
    rows = {key: value for key, value in first.values.items() if _per_token(value, tokens)}
    least = max(unit.experts.values())
    chosen = next((key for key in rows if unit.enters(key) and _is_index(rows[key], least)), None)
    if chosen is None and unit.listed():
        chosen = _explains_the_rows(unit, trials, rows)
    if chosen is None and (combine := _explains_zero_rows(unit, trials, rows)) is not None:
        top_k = int((rows[combine].reshape(tokens, -1)[0] != 0).sum())
        others = [key for key in rows if key[0] == combine[0] and key != combine]
        logits = tuple(key for key in others if rows[key].shape[-1] == rows[combine].shape[-1])
        vectors = _distinct_vectors(first, {least}, combine[0], unit)
        return Places(logits, combine, None, vectors, least, top_k, "combine"), ""
    if chosen is None:
        scored = any(
            value.shape[-1] in unit.experts.values() and not unit.holds(key[0])
            for key, value in rows.items()
            if key[1].startswith("output")
        )
        return None, "no indices reach the experts: the choice of experts cannot be named" if scored else ""
    top_k = rows[chosen].shape[-1]
    idx = _origin(chosen, rows, unit, trials)
    entering = (key for key in rows if key[0] == chosen[0] and key != chosen and _is_weight(rows[key], top_k))
    weights = next((_origin(key, rows, unit, trials) for key in entering), None)
    size = max(least, int(rows[chosen].max()) + 1)
    candidates = [
        key
        for key, value in rows.items()
        if key[1].startswith("output")
        and not unit.holds(key[0])
        and value.is_floating_point()
        and size <= value.shape[-1]
    ]
    # What the router itself returns comes first, then what runs inside it, then the rest of the unit.
    router = idx[0]
    candidates.sort(
        key=lambda key: (key[0] != router, not key[0].startswith(f"{router}."), key[0].count("."))
    )
    if not candidates:
        return None, "no scores over all experts cross a module boundary"
    sizes = {rows[key].shape[-1] for key in candidates}
    return Places(
        tuple(candidates), idx, weights, _distinct_vectors(first, sizes, router, unit), least, top_k
    ), ""


def _per_token(value: Tensor, tokens: int) -> bool:
    return value.ndim >= 2 and value.shape[-1] > 0 and value.numel() == tokens * value.shape[-1]


def _is_index(value: Tensor, num_experts: int) -> bool:
    return value.dtype in _WHOLE and value.shape[-1] <= num_experts and int(value.min()) >= 0


def _is_weight(value: Tensor, top_k: int) -> bool:
    return value.is_floating_point() and value.shape[-1] == top_k


def _explains_the_rows(unit: Unit, trials: Sequence[Trial], rows: Mapping[Key, Tensor]) -> Key | None:
    """Indices that say how many tokens each expert of a plain list was called with, in every trial."""
    (name, size), *more = [(name, unit.experts[name]) for name in unit.listed()]
    if more:
        return None
    experts = [f"{name}.{child}" for child, _ in unit.module.get_submodule(name).named_children()]

    def explains(key: Key) -> bool:
        for trial in trials:
            called = [trial.values.get((expert, "input[0]")) for expert in experts]
            counts = [0 if value is None else value.shape[:-1].numel() for value in called]
            if torch.bincount(trial.read(key).reshape(-1).long(), minlength=size).tolist() != counts:
                return False
        return True

    return next((key for key in rows if key[0] and _is_index(rows[key], size) and explains(key)), None)


def _explains_zero_rows(unit: Unit, trials: Sequence[Trial], rows: Mapping[Key, Tensor]) -> Key | None:
    """Scores [tokens, E] that are 0 where the experts' input, every token once for each expert, is 0."""

    def explains(key: Key, given: Key) -> bool:
        for trial in trials:
            scores, handed = trial.read(key), trial.read(given)
            handed = handed.reshape(-1, handed.shape[-1])
            if handed.shape[0] != scores.numel() or not scores.is_floating_point():
                return False
            taken = scores.reshape(-1, scores.shape[-1]) != 0
            if not torch.equal(taken.transpose(0, 1).reshape(-1), (handed != 0).any(dim=-1)):
                return False
            if len(set(taken.sum(dim=-1).tolist())) != 1 or taken.all():
                return False
        return True

    entering = [key for key in trials[0].values if unit.enters(key)]
    outputs = [key for key in rows if key[0] and key[1].startswith("output") and not unit.holds(key[0])]
    return next((key for key in outputs for given in entering if explains(key, given)), None)


def _origin(key: Key, rows: Mapping[Key, Tensor], unit: Unit, trials: Sequence[Trial]) -> Key:
    """The output of the outermost module that gave this very value in every trial, or the experts' input itself."""
    given = [
        other
        for other, value in rows.items()
        if other[0]
        and other[1].startswith("output")
        and not unit.holds(other[0])
        and value.dtype == rows[key].dtype
        and value.shape[-1] == rows[key].shape[-1]
        and all(same_values(trial.read(other), trial.read(key)) for trial in trials)
    ]
    return min(given, key=lambda other: other[0].count("."), default=key)


def _distinct_vectors(trial: Trial, sizes: set[int], router: str, unit: Unit) -> tuple[Key, ...]:
    """Vectors with one number per expert, each once, named from the router where it has them."""
    found: dict[tuple[float, ...], Key] = {}
    for key in sorted(trial.values, key=lambda key: (key[0] != router, key[0] != "", key[0])):
        value = trial.values[key]
        vector = value.ndim == 1 and value.shape[0] in sizes and value.is_floating_point()
        if vector and not unit.holds(key[0]):
            found.setdefault(tuple(value.tolist()), key)
    return tuple(found.values())

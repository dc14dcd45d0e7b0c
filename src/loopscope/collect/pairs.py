"""Which pairs of visits get a transition row."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from loopscope.catalog.rows import visit_label
from loopscope.trace import TracePoint, VisitSpec

PairKind = Literal["within_step", "step_boundary", "wrap", "from_input", "entry", "exit"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """Two visits whose residuals are compared, `source` the earlier one.

    Pairs of one kind and the same positions are equal, whatever E and k of their visits: ranks mean the same one.
    """

    kind: PairKind
    """What relates them."""
    source: VisitSpec
    """The visit that is compared from."""
    target: VisitSpec
    """The visit that is compared to."""
    before: int | None = None
    """On `step_boundary`: position of the same layer one loop step before `source`; None for the first."""

    @property
    def key(self) -> tuple[str, int, int]:
        """(kind, from_pos, to_pos): unique within a step."""
        return (self.kind, self.source.unrolled_pos, self.target.unrolled_pos)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def same_layer(self) -> bool:
        """True where both are visits of one physical layer, so that their experts are the same experts."""
        return (
            self.source.block == "loop"
            and self.target.block == "loop"
            and self.source.layer_idx == self.target.layer_idx
        )


Key = VisitSpec | Pair
"""What partial vectors and rows belong to."""


def spec_of(point: TracePoint) -> VisitSpec:
    """The point's coordinates without its tensors."""
    return VisitSpec(
        unrolled_pos=point.unrolled_pos,
        block=point.block,
        loop_step=point.loop_step,
        layer_idx=point.layer_idx,
        num_experts=point.num_experts,
        top_k=point.top_k,
    )


def describe_key(key: Key, visits: Collection[VisitSpec]) -> str:
    """A visit or pair in words; `visits` are those of the step, which its head and its tail are counted in."""

    def label(visit: VisitSpec) -> str:
        before = sum(v.block == visit.block and v.unrolled_pos < visit.unrolled_pos for v in visits)
        return visit_label(visit.block, visit.loop_step, visit.layer_idx, before)

    if isinstance(key, VisitSpec):
        return f"{label(key)} (unrolled_pos {key.unrolled_pos})"
    source, target = key.source, key.target
    positions = f"unrolled_pos {source.unrolled_pos} → {target.unrolled_pos}"
    return f"{key.kind} pair {label(source)} → {label(target)} ({positions})"


def loop_steps_executed(visits: Iterable[VisitSpec]) -> int:
    """R really executed: the loop steps that were seen, counted; 0 for a model without a loop."""
    return len({visit.loop_step for visit in visits if visit.block == "loop"})


@lru_cache(maxsize=64)
def plan_pairs(visits: tuple[VisitSpec, ...]) -> tuple[Pair, ...]:
    """The pairs of metrics.md among the visits that are present.

    * `within_step`: a visit of the loop → the next one in execution order, in one loop step
    * `step_boundary`: one layer, from its visit in an earlier loop step, the one before where there is one
    * `wrap`: last visit of a loop step → first one of the next. At L = 1 these are the pairs of `step_boundary`
      again; both kinds are written, so that a query by kind needs no special case.
    * `from_input`: the loop's input (the last head visit's output) → every loop visit
    * `entry`: last head visit → first loop visit; `exit`: last loop visit → first tail visit

    A pair exists only where both its visits were seen; a missing visit, whose position is left free, never makes two
    strangers neighbours. A visit is never paired with itself, and never with one that ran after it. Cached: the plan of
    a model is the same at every step of one R.
    """
    return tuple(sorted(_pairs(visits), key=lambda pair: (pair.target.unrolled_pos, pair.kind)))


def _pairs(visits: tuple[VisitSpec, ...]) -> Iterator[Pair]:
    at = {visit.unrolled_pos: visit for visit in visits}
    loop = {pos: visit for pos, visit in sorted(at.items()) if visit.block == "loop"}
    if not loop:
        return
    earlier: dict[int, list[VisitSpec]] = {}
    for pos, visit in loop.items():
        before = loop.get(pos - 1)
        if before is not None and before.loop_step == visit.loop_step:
            yield Pair(kind="within_step", source=before, target=visit)
        if before is not None and before.loop_step == visit.loop_step - 1:
            yield Pair(kind="wrap", source=before, target=visit)
        chain = earlier.setdefault(visit.layer_idx, [])
        chain.append(visit)
        if source := _same_layer_before(chain, loop):
            second = _same_layer_before(chain[:-1], loop)
            yield Pair(
                kind="step_boundary",
                source=source,
                target=visit,
                before=None if second is None else second.unrolled_pos,
            )
    yield from _block_pairs(at, loop)


def _same_layer_before(chain: list[VisitSpec], loop: Mapping[int, VisitSpec]) -> VisitSpec | None:
    """The layer's visit before the last one of `chain`: of the loop step before, or of an earlier one where it lies in
    no other and nothing between the two is missing."""
    if len(chain) < 2:
        return None
    source, target = chain[-2], chain[-1]
    if source.loop_step == target.loop_step - 1:
        return source
    between = range(source.unrolled_pos + 1, target.unrolled_pos)
    return source if all(pos in loop for pos in between) else None


def _block_pairs(at: Mapping[int, VisitSpec], loop: Mapping[int, VisitSpec]) -> Iterator[Pair]:
    """`entry`, `from_input` and `exit`: found by depth, so that a lost head or tail visit gives no pair."""
    first_pos, last_pos = _ends(at, loop)
    head, tail = at.get(first_pos - 1), at.get(last_pos + 1)
    first, last = at.get(first_pos), at.get(last_pos)
    if head is not None and head.block == "head":
        if first is not None and first.block == "loop":
            yield Pair(kind="entry", source=head, target=first)
        for visit in loop.values():
            yield Pair(kind="from_input", source=head, target=visit)
    if tail is not None and tail.block == "tail" and last is not None and last.block == "loop":
        yield Pair(kind="exit", source=last, target=tail)


def _ends(at: Mapping[int, VisitSpec], loop: Mapping[int, VisitSpec]) -> tuple[int, int]:
    """Where the loop begins and ends. Where every pass runs every layer, also where its first or last visit was not
    seen."""
    num_steps = 1 + max(visit.loop_step for visit in loop.values())
    num_layers = 1 + max(visit.layer_idx for visit in loop.values())
    starts = {pos - (visit.loop_step * num_layers + visit.layer_idx) for pos, visit in loop.items()}
    start = min(starts)
    end = start + num_steps * num_layers - 1
    # A visit that was not seen leaves its position free.
    if len(starts) == 1 and all(pos not in at or pos in loop for pos in range(start, end + 1)):
        return start, end
    return min(loop), max(loop)

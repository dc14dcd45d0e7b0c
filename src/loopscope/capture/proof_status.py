"""What a plan's tensors are enough for, and how well each router's choice is proven."""

from collections import Counter
from collections.abc import Collection, Iterator

from loopscope.capture.routing import RoutingSpec
from loopscope.capture.spec import ASSIGNMENTS, CapturePlan

_UNSEEN = "unproven: "
_REASONS = {
    "recomputed": "a decoder makes the choice once more from the scores, and nothing else tells it",
    "unsaid": "the choice is of a decoder that was not registered with `loopscope.capture.decoder`, so that nobody "
    "said whether it makes it once more from the scores",
    "sampled": "the choice is drawn, so that the scores do not tell it",
    "given": "the choice comes from something else than the scores",
    "soft": "nothing but the scores is captured",
}


def missing_tensors(seen: Collection[str], routing: RoutingSpec | None) -> str | None:
    """What a router lacks, as the end of a message; None where nothing is missing.

    Args:
        seen: router tensors that are captured in the block.
        routing: how it chooses; None where the plan does not say.
    """
    choice = "top_k" if routing is None else routing.choice
    if "router_logits" not in seen:
        return "without router_logits, which nothing else gives. Capture router_logits, or no router."
    found = [name for name in ASSIGNMENTS if name in seen]
    if not found and choice != "soft":
        return (
            "without topk_idx, which nothing else gives. Capture topk_idx (or dispatch, combine, token_idx), or no "
            "router."
        )
    if routing is None or choice == "soft":
        return None
    masks = [name for name in found if name != "topk_idx"]
    weighed = {"topk_weights", "combine", "token_weights"} & set(seen)
    if choice == "expert_choice" and not masks:
        return "and experts that choose; expected dispatch, combine or token_idx, which tell their tokens."
    if not routing.dropless and not masks and "kept" not in seen:
        return "and drops assignments; expected dispatch, combine or kept, which tell what ran."
    if not routing.dropless and routing.variable_k and "topk_idx" not in seen:
        return "and drops assignments of a k that varies; expected topk_idx as well, which tells what was asked for."
    if routing.dropless and "kept" in seen:
        return "with kept, but does not drop assignments; expected dropless: false."
    if "kept" in seen and "topk_idx" not in seen:
        return "with kept; expected topk_idx as well, whose choices it is about."
    if routing.weights == "own" and not weighed:
        return "and weights that do not follow from the scores; expected topk_weights or combine."
    if "topk_weights" in seen and "topk_idx" not in seen and routing.top_k > 1:
        return "with topk_weights, whose order only topk_idx tells; expected topk_idx, or combine."
    return None


def proofs(plan: CapturePlan) -> dict[str, str]:
    """Block with a router → "proven", "proven by the experts' inputs", or "unproven: " and why."""
    found = {}
    for block in plan.blocks():
        routing = plan.routing_of(block)
        if routing is None:
            continue
        why = next(_doubts(plan, block, routing), None)
        if why is None:
            found[block] = "proven"
        else:
            seen = why != "soft" and (plan.experts_of(block) or _handed_to_experts(plan, block))
            found[block] = "proven by the experts' inputs" if seen else _UNSEEN + _REASONS[why]
    return found


def unproven(plan: CapturePlan) -> list[str]:
    """One line for each reason for which routers' choices are unproven."""
    counts = Counter(text for text in proofs(plan).values() if text.startswith(_UNSEEN))
    return [
        f"{count} router(s) {text}. Capture expert_input at each expert's module, or what the experts were called with"
        for text, count in counts.items()
    ]


def _handed_to_experts(plan: CapturePlan, block: str) -> bool:
    """True where the choice is read from what a module was called with."""
    return any(
        plan[part].tensors[name].startswith(("input", "kwarg"))
        for part in plan.parts_of(block)
        for name in ASSIGNMENTS
        if name in plan[part].tensors
    )


def _doubts(plan: CapturePlan, block: str, routing: RoutingSpec) -> Iterator[str]:
    parts = plan.parts_of(block)
    sources = {
        name: source
        for part, spec in parts.items()
        for name, source in spec.sources(f"plan[{part!r}]").items()
    }
    if routing.choice == "soft":
        if "combine" not in sources:
            yield "soft"
        return
    for name in ASSIGNMENTS:
        if name in sources and (recomputes := sources[name].recomputes) is not False:
            yield "recomputed" if recomputes else "unsaid"
    if routing.choice in ("sampled", "given"):
        yield routing.choice

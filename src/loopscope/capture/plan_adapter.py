"""What adapters that go by a capture plan share, whatever framework runs the model."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from loopscope.capture.adapter import LossParts
from loopscope.capture.capabilities import BackendSupport
from loopscope.capture.errors import CoverageError
from loopscope.capture.glob_gaps import glob_gaps
from loopscope.capture.masks import MaskError, fitting
from loopscope.capture.plan import resolve_plan
from loopscope.capture.plan_support import PlanSupport
from loopscope.capture.proof_status import unproven
from loopscope.capture.spec import CapturePlan, CaptureSpec
from loopscope.capture.visits import VisitPlaces
from loopscope.trace import TraceMeta, TracePoint, VisitSpec


class PlanAdapter:
    """Derives a plan from the model's modules and resolves the user's overrides; subclasses listen to the model."""

    objective: tuple[str, ...] = ()
    """Numbers of the objective that a forward's output tells."""

    def __init__(
        self,
        model: Any,
        *,
        overrides: Mapping[str, Any] | None = None,
        valid: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self._valid = model, valid
        plan = resolve_plan(self.derive(), overrides, self.modules())
        gaps = glob_gaps(overrides or (), plan, self.modules())
        for gap in gaps:
            warnings.warn(gap, stacklevel=4)
        self.plan = CapturePlan(
            plan, declared_layers=plan.declared_layers, notes=(*plan.notes, *gaps, *unproven(plan))
        )
        self.places = VisitPlaces.of_plan(self.plan)

    def modules(self) -> Mapping[str, Any]:
        """Every module by name, in the model's order."""
        raise NotImplementedError

    def derive(self) -> CapturePlan:
        """The plan before the user's overrides."""
        raise NotImplementedError

    def expected_visits(self) -> tuple[VisitSpec, ...]:
        """What the plan promises, in the order that was seen where one was."""
        return self.places.expected()

    def promised_meta(self) -> TraceMeta | None:
        """The TraceMeta of a forward that keeps the plan's promise; None where it promises no number of calls."""
        return self.places.promised_meta()

    def settings(self) -> Mapping[str, Any]:
        """Nothing shows."""
        return {}

    def backend_support(self) -> BackendSupport:
        """What the plan captures."""
        return PlanSupport(self.plan, objective=self.objective)

    def module(self, name: str) -> Any:
        """The module of this name."""
        return self.modules()[name]

    def in_backward(self) -> bool:
        """Frameworks that recompute nothing."""
        return False

    def ignored(self) -> str:
        """Said of a forward that is none of training."""
        return "outside training"

    def valid(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        points: Sequence[TracePoint],
        blocks: Sequence[str],
    ) -> Any:
        """The mask of the user's own function, where one was given.

        Raises:
            MaskError: the function raised, or gave something else than a mask of the visits.
        """
        if self._valid is None:
            return None
        try:
            mask = self._valid(args, kwargs)
        except Exception as error:
            raise MaskError(
                f"valid= raised {type(error).__name__}: {error}. It is called with the forward's positional arguments "
                "(a tuple) and its keyword arguments (a dict), and gives [B, S] bool, or None where all tokens count."
            ) from error
        return None if mask is None else fitting(self.as_torch(mask), points)

    def as_torch(self, mask: Any) -> Any:
        """The user's mask as a torch tensor."""
        return mask

    def losses(self, kwargs: Mapping[str, Any], output: Any) -> LossParts | None:
        """A plain model's output says nothing of the loss."""
        return None


_DENSE = "the model is dense: no layer has a router, so rows are of residuals and transitions alone"


def plan_of_layers(
    model: Any,
    layers: Iterable[tuple[str, int, str]],
    moes_of: Callable[[str], Mapping[str, Mapping[str, CaptureSpec]]],
    declared: Callable[[], tuple[int, ...] | None],
    *,
    notes: tuple[str, ...] = (),
) -> CapturePlan:
    """One block per layer, dense ones included, with the boundaries of its MoE.

    Args:
        model: named in errors.
        layers: (name, physical number, source of the residual) of each layer, in the model's order.
        moes_of: layer name → name and boundaries of each MoE in it.
        declared: physical numbers of the MoE layers that the configuration declares, () for a dense model; None where
            it keeps no list. Asked after `moes_of`.
        notes: what is left out.

    Raises:
        CoverageError: a layer has two routers, or those found are not the MoE layers that are declared.
    """
    boundaries: dict[str, CaptureSpec] = {}
    found = []
    for layer, number, residual in layers:
        boundaries[layer] = CaptureSpec(tensors={"residual": residual}, layer=number)
        if len(moes := moes_of(layer)) > 1:
            raise CoverageError(f"{layer} has {len(moes)} routers ({', '.join(moes)}), expected at most one.")
        for inside in moes.values():
            found.append(number)
            boundaries |= inside
    promised = declared()
    if promised == () and not found:
        return CapturePlan(boundaries, declared_layers=(), notes=(*notes, _DENSE))
    check_coverage(tuple(found), tuple(found) if promised is None else promised, type(model).__name__)
    return CapturePlan(boundaries, declared_layers=promised, notes=notes)


def check_coverage(found: tuple[int, ...], declared: tuple[int, ...], model: str) -> None:
    """Raise CoverageError where the MoE layers found are not those declared, or where there is none."""
    if not found:
        raise CoverageError(
            f"{model}: no router was found; its configuration declares {len(declared)} MoE layer(s). Attach to a MoE "
            "model."
        )
    if found != declared:
        raise CoverageError(
            f"{model}: routers were found in layers {list(found)}, the configuration declares MoE layers "
            f"{list(declared)} (missing {sorted(set(declared) - set(found))}, not declared "
            f"{sorted(set(found) - set(declared))}). A dense layer must not count as MoE."
        )

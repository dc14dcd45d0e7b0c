"""Where a tensor comes from at a module boundary: a small grammar, parsed when the plan is made.

``output``, ``output[1]``, ``output[0][-1]``                    what the module returned
``output.logits``, ``output[logits]``                          its attribute; of a dict, the value of a key
``input[0]``, ``kwarg.hidden_states``                          what it was called with
``module.gate.bias``                                           its own parameter, buffer or attribute
``local.topk_idx``                                             a variable of its own code, as it was at its return
``decode.NAME``                                                a function that was registered under this name
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loopscope.capture.errors import PlanError, ReconcileError
from loopscope.capture.values import offloaded

ROOTS = ("output", "input", "kwarg", "module", "local", "decode")
_TOKEN = re.compile(r"\.([A-Za-z_][A-Za-z_0-9]*)|\[(-?\d+)\]|\[(['\"]?)([A-Za-z_][\w.\-]*)\3\]")


def hidden_states(module: Any, output: Any) -> Any:
    """What a layer returns, or the first item where it returns a tuple; where a token has several streams, they are
    one vector: [B, S, n, d] becomes [B, S, n * d]."""
    hidden = output[0] if isinstance(output, (tuple, list)) else output
    return hidden.flatten(2) if getattr(hidden, "ndim", 0) == 4 else hidden


def streams(module: Any, output: Any) -> Any:
    """[B, S, n·d], of a layer that keeps n residual streams, [B, S, n, d]."""
    return hidden_states(module, output).flatten(2)


DECODERS: dict[str, Callable[..., Any]] = {"hidden_states": hidden_states, "streams": streams}
"""Name → a `RegisteredDecoder`, or a function (module, output) → tensor. See `decoder`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module, while its window is open."""

    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    local: Mapping[str, Any] | None = None
    """The local variables that sources name, at its return; None where they were not seen."""


@dataclass(frozen=True, slots=True)
class RegisteredDecoder:
    """A function that makes a tensor of one call."""

    function: Callable[[Call], Any]
    recomputes: bool
    """True where it makes the router's choice once more instead of reading it."""

    def __call__(self, call: Call) -> Any:
        """What the function makes of a call."""
        return self.function(call)


def decoder(name: str, *, recomputes: bool) -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    """Register a function as the source ``decode.NAME``, for what no path can name::

        @loopscope.capture.decoder("last_choice", recomputes=False)
        def last_choice(call):
            return call.module.last_idx

    Args:
        name: letters, digits and underscores; registering a name again replaces the function.
        recomputes: True where the function makes the choice once more from the scores. Comparing that with the scores
            proves nothing, so the choice counts as unproven unless the plan captures `expert_input` as well.

    The function gets a `Call` (`module`, `args`, `kwargs`, `output`), runs without gradients when the call has ended,
    and must change nothing.

    Raises:
        PlanError: the name is no name, or `recomputes` is not said.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise PlanError(f"decoder name is {name!r}, expected letters, digits and underscores.")
    if not isinstance(recomputes, bool):
        raise PlanError(f"decoder {name!r}: recomputes is {recomputes!r}, expected True or False.")

    def register(function: Callable[[Call], Any]) -> Callable[[Call], Any]:
        DECODERS[name] = RegisteredDecoder(function, recomputes)
        return function

    return register


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed source."""

    text: str
    """As written."""
    root: str
    """One of ROOTS."""
    path: tuple[str | int, ...]
    """Attribute names and indices, outermost first."""

    @property
    def recomputes(self) -> bool | None:
        """True for a decoder that makes the choice once more; None for one that does not say."""
        if self.root != "decode":
            return False
        found = DECODERS.get(str(self.path[0]))
        return found.recomputes if isinstance(found, RegisteredDecoder) else None

    def read(self, call: Call) -> Any:
        """The value this source names in `call`.

        Raises:
            ReconcileError: the call has no such value; says what it has.
        """
        if self.root == "decode":
            function = DECODERS[str(self.path[0])]
            if isinstance(function, RegisteredDecoder):
                return function(call)
            return function(call.module, call.output)
        if self.root == "kwarg" and self.path[0] not in call.kwargs:
            raise ReconcileError(
                f"source {self.text!r} of {type(call.module).__name__}: it was called with keywords "
                f"{sorted(call.kwargs)} and {len(call.args)} positional argument(s). Name one of those."
            )
        if self.root == "local" and call.local is None:
            raise ReconcileError(
                f"source {self.text!r} of {type(call.module).__name__}: its local variables were not seen, since "
                "another profiler is at work, or other code than its forward's ran. Trace without the profiler."
            )
        value: Any = {
            "output": call.output,
            "input": call.args,
            "module": call.module,
            "kwarg": call.kwargs,
            "local": call.local,
        }[self.root]
        owners: list[tuple[Any, str]] = []
        for position, step in enumerate(self.path):
            if self.root == "module":
                owners.append((value, ".".join(map(str, self.path[position:]))))
            try:
                value = _step(value, step)
            except (IndexError, TypeError, KeyError, AttributeError):
                raise ReconcileError(
                    f"source {self.text!r} of {type(call.module).__name__}: {_describe(value)} has no "
                    f"{'item' if isinstance(step, int) else 'attribute'} {step!r}. Correct the capture plan."
                ) from None
        if owners and getattr(getattr(value, "device", None), "type", "") == "meta":
            found = offloaded(owners)
            return value if found is None else found
        return value


def parse_source(text: Any, where: str) -> Source:
    """Parse a source.

    Raises:
        PlanError: names `where`, and what the grammar allows.
    """
    if not isinstance(text, str):
        raise PlanError(f"{where}: source is {text!r}, expected text such as 'output[0]'.")
    root = re.split(r"[.\[]", text, maxsplit=1)[0]
    rest = text[len(root) :]
    path = tuple(name or key or int(index) for name, index, _, key in _TOKEN.findall(rest))
    whole = "".join(match[0] for match in _TOKEN.finditer(rest)) == rest
    if root not in ROOTS or not whole or (root in ("kwarg", "module", "local", "decode") and not path):
        raise PlanError(
            f"{where}: source {text!r} cannot be read; expected one of output, output[0], output.name, output[key], "
            "input[0], kwarg.name, module.name, local.name, decode.name, with further [index] or .name behind."
        )
    if root == "decode" and path[0] not in DECODERS:
        raise PlanError(
            f"{where}: source {text!r}: no decoder {path[0]!r}; known: {sorted(DECODERS) or 'none'}."
        )
    return Source(text, root, path)


def _step(value: Any, step: str | int) -> Any:
    # A key of a dict comes before an attribute: a dict's attributes are its methods.
    if isinstance(step, int):
        return value[step]
    return value[step] if isinstance(value, Mapping) and step in value else getattr(value, step)


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {sorted(map(str, value))}"
    if getattr(value, "shape", None) is not None:
        return f"a tensor {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")

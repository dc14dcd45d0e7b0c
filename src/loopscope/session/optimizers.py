"""The end of a step, heard from the optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

from loopscope.errors import ConfigError


def innermost(optimizers: Any) -> tuple[Any, ...]:
    """The torch optimizers themselves.

    Args:
        optimizers: a torch optimizer, a wrapper of one that keeps it as `.optimizer` (accelerate, DeepSpeed), or a
            sequence of them; None for none.

    Raises:
        ConfigError: something else was given.
    """
    several = isinstance(optimizers, (list, tuple))
    if several and not optimizers:
        raise ConfigError(
            "optimizer is an empty sequence, expected the optimizer, or all that share the model. Leave it out where "
            "the loop says itself where a step ends."
        )
    given = optimizers if several else () if optimizers is None else (optimizers,)
    return tuple(_innermost(one) for one in given)


def on_step(optimizers: Iterable[Any], stepped: Callable[[bool], None]) -> Callable[[], None]:
    """Call `stepped` whenever one of the optimizers has stepped; returns what undoes it.

    Args:
        optimizers: as `innermost` gives them.
        stepped: gets True for the first of the optimizers, False for the others: one update of the model may be the
            work of several.
    """

    def hook(is_first: bool) -> Callable[..., None]:
        def after(*_: Any) -> None:
            stepped(is_first)

        return after

    handles = [one.register_step_post_hook(hook(number == 0)) for number, one in enumerate(optimizers)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _innermost(optimizer: Any) -> Any:
    # A wrapper inherits the registration, and never calls what is registered.
    seen = set()
    while getattr(optimizer, "optimizer", None) is not None and id(optimizer) not in seen:
        seen.add(id(optimizer))
        optimizer = optimizer.optimizer
    if not callable(getattr(optimizer, "register_step_post_hook", None)):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer, which tells when it has "
            "stepped. Leave it out and call run.end_step() behind the update."
        )
    return optimizer

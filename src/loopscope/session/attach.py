"""`loopscope.attach`: observe a model that was not written for loopscope."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loopscope.alerts import AlertConfig
from loopscope.capture.capabilities import synthesize
from loopscope.capture.files import load_overrides
from loopscope.capture.registry import resolve_adapter
from loopscope.capture.requirements import requirements_by_metric
from loopscope.capture.settings import RunSettings
from loopscope.capture.support import preflight
from loopscope.errors import ConfigError
from loopscope.session.attached import Attachment
from loopscope.session.config import LoopscopeConfig, OnError
from loopscope.session.optimizers import innermost


def attach(
    model: Any,
    *,
    out: str | Path,
    every: int = 10,
    task: str = "pretrain",
    backend: str | None = None,
    plan: Mapping[str, Any] | str | Path | None = None,
    run_name: str = "",
    require: Iterable[str] = (),
    num_microbatches: int | None = None,
    optimizer: Any = None,
    first_step: int = 1,
    on_error: OnError = "record",
    resume: bool = False,
    per_rank: bool = False,
    verify: bool = True,
    meshes: Mapping[str, Any] | None = None,
    mirror: str = "",
    preempted_by: Iterable[str] = (),
    system_every_s: float = 10.0,
    trackers: Iterable[str] = (),
    alerts: AlertConfig | None = None,
    **options: Any,
) -> Attachment:
    """Observe the training of `model`; everything is checked here, and nothing is attached before ``with``::

        with loopscope.attach(model, out="runs/mine", every=10):
            train(model)

    A step is `num_microbatches` training forwards (training mode, gradients on); with `optimizer` all of them up to its
    update. Forwards in eval mode or without gradients never count, nor those that raised. Attaching a model that is
    attached already is an error.

    Args:
        model: a torch module, a transformers model, torchtitan's MoE, or an mlx model.
        out: folder of the run.
        every: trace every N steps; also steps 1-10, powers of two up to 512. 0 turns tracing off.
        task: "pretrain", "sft" or "probe".
        backend: "torchtitan", "torch", "transformers" or "mlx"; None takes it from the model's class.
        plan: overrides of the derived capture plan, or the path of a YAML file with them.
        run_name: name for people.
        require: metrics that must be there, as `column` or `table.column`.
        num_microbatches: forwards per optimizer step; 1, or with `optimizer` as many as come.
        optimizer: the torch optimizer (or all that share the model), whose update ends a step: no count is needed, and
            groups may be of any size. An update that a gradient scaler skips is none: its forwards count to the next.
        first_step: the first step this attempt trains; restored step + 1 after a resume.
        on_error: "record" counts loopscope's errors and lets training go on, "raise" stops it. A capture that does not
            reproduce the model's own choice gives no rows, and a critical event.
        resume: continue the run in `out`.
        per_rank: rank-local rows beside global ones.
        verify: reconcile every traced choice with its captured scores.
        meshes: `mesh`, `dp_mesh`, `tp_mesh`, `ep_mesh`, `cp_mesh` for custom reducers.
        mirror: URL or absolute path at which a copy of everything sealed is kept; empty for nowhere.
        preempted_by: what the scheduler sends, makes or sets before it takes the machine away: "SIGUSR1", "file:PATH",
            "env:NAME" (a variable that this process sets).
        system_every_s: seconds between two samples of the machine's own figures, where psutil is installed; 0: none.
        trackers: "wandb", "tensorboard", or what another package registered; a W&B run that is under way is written
            into, not another one started.
        alerts: bounds of the alert rules, and where alerts are sent besides the log and the health table.
        options: passed to the adapter, such as `valid` (a function of the forward's arguments that gives the [B, S]
            mask of tokens that are no padding).

    Raises:
        ConfigError: a wrong argument, plan or requirement; names the place and the nearest right name.
        UnsupportedError: a setting that this backend cannot honour.
        CoverageError: the routers found are not the MoE layers that the model declares.
    """
    require = tuple(require)
    counted = num_microbatches is not None
    if counted and (
        not isinstance(num_microbatches, int) or num_microbatches is True or num_microbatches < 1
    ):
        raise ConfigError(f"num_microbatches is {num_microbatches!r}, expected an integer >= 1.")
    optimizers = innermost(optimizer)
    backend = backend or (
        "transformers" if plan is None and _wraps_transformers(model) else backend_of(model)
    )
    plan = load_overrides(plan) if isinstance(plan, (str, Path)) else plan
    adapter = resolve_adapter(task, backend)(model, overrides=plan, **options)
    given = {
        "trace_every": every,
        **({"num_microbatches": num_microbatches} if counted else {}),
        "per_rank": per_rank,
        "resume": resume,
        "verify": verify,
        "require": require,
        "trackers": tuple(trackers),
        "alerts": alerts or AlertConfig(),
    }
    settings = RunSettings(**{**adapter.settings(), **given})
    gaps = preflight(settings, task, backend)
    capabilities = synthesize(requirements_by_metric(), adapter.backend_support())
    capabilities.require(require)
    config = LoopscopeConfig(
        out=Path(out),
        run_name=run_name,
        trace_every=every,
        probe_every=0,
        per_rank=per_rank,
        on_error=on_error,
        resume=resume,
        mirror=mirror,
        preempted_by=tuple(preempted_by),
        system_every_s=system_every_s,
        trackers=settings.trackers,
        alerts=settings.alerts,
    )
    facts = {
        "task": task,
        "backend": backend,
        "model": type(model).__name__,
        "plan": {name: spec.plain() for name, spec in adapter.plan.items()},
        "notes": list(adapter.plan.notes),
        "null_reasons": capabilities.absent(),
        "gaps": [f"{entry.field}: {entry.status}: {entry.reason}" for entry in gaps],
    }
    return Attachment(
        adapter,
        config,
        settings,
        first_step=first_step,
        facts=facts,
        meshes=dict(meshes or {}),
        optimizers=optimizers,
    )


def backend_of(model: Any) -> str:
    """The backend of a model, from the frameworks that are loaded already; imports none.

    Raises:
        ConfigError: the model belongs to none of them.
    """
    inner = getattr(model, "_orig_mod", model)
    for backend, module, name in (
        ("transformers", "transformers.modeling_utils", "PreTrainedModel"),
        ("torchtitan", "torchtitan.protocols.module", "Module"),
        ("torch", "torch.nn", "Module"),
        ("mlx", "mlx.nn", "Module"),
    ):
        if isinstance(inner, getattr(sys.modules.get(module), name, ())):
            # A model with the trace contract records itself, whatever it is built from.
            records_itself = backend == "torchtitan" and callable(getattr(inner, "expected_visits", None))
            return "torch" if records_itself else backend
    raise ConfigError(
        f"got a {type(model).__name__}, expected a torch.nn.Module, a transformers model, a torchtitan model or an "
        "mlx.nn.Module. Pass the model itself, not its trainer."
    )


def _wraps_transformers(model: Any) -> bool:
    """True for a torch module around one transformers model: an adapter package's, DistributedDataParallel, a value
    head. One that records itself is left alone."""
    kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    module: Any = getattr(sys.modules.get("torch.nn"), "Module", None)
    if kind is None or not isinstance(model, module) or callable(getattr(model, "expected_visits", None)):
        return False
    return _outermost(model, kind) == 1


def _outermost(model: Any, kind: Any) -> int:
    """How many models of a kind a module holds, not counting those inside another one."""
    if isinstance(model, kind):
        return 1
    return sum(_outermost(child, kind) for child in model.children())

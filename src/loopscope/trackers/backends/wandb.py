"""Weights & Biases: scalars over an x axis of their own, tables of visits, alerts.

The run is the trainer's where one is under way in this process (torchtitan's with ``metrics.enable_wandb``, or one
that the script started), else a new one whose id is the run's `run_id`, so that a resumed run goes on in it. Scalars
carry ``loopscope/step``, which is their x axis: W&B's own step only rises, and would throw away what comes after a
rollback. Offline, each attempt is a folder of its own, which W&B begins at its step 0: a resumed attempt's begins
behind the earlier ones, so that all can be uploaded into one run. W&B reads its own settings from the environment
(WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, ...).
"""

import os
from typing import Any

from loopscope.alerts import AlertNotice
from loopscope.errors import ConfigError, LoopscopeError
from loopscope.trackers.earlier import logged_before
from loopscope.trackers.protocol import StepValues, TrackerStart, alert_text
from loopscope.trackers.shared_rows import SharedRows

PACKAGES = ("wandb",)
INSTALL = "pip install 'loopscope[wandb]'"

STEP = "loopscope/step"
VISITS = "loopscope/visits"

_LEVELS = {"warn": "WARN", "critical": "ERROR"}
_TITLE_LENGTH = 63  # W&B refuses titles of 64 characters and more


class WandbTracker:
    """Writes into one W&B run.

    Args:
        run: a `wandb.Run`.
        is_own: True where loopscope started it, and ends it.
        begin_at: W&B's own step of the first row, where W&B does not know it: above all of earlier attempts.
    """

    own_keys = (STEP, VISITS)

    def __init__(self, run: Any, *, is_own: bool, begin_at: int = 0) -> None:
        self._run, self._is_own, self._begin_at = run, is_own, begin_at
        self._rows = None if is_own else SharedRows(run)
        self._defined: set[str] = set()
        self.where = _place(run)

    def log(self, values: StepValues) -> None:
        """One history row; where the table of visits is due, it is in it."""
        row: dict[str, Any] = {**values.scalars, STEP: values.step}
        for key in values.scalars.keys() - self._defined:
            self._run.define_metric(key, step_metric=STEP, step_sync=False)
            self._defined.add(key)
        if values.show_table and values.visits is not None:
            import wandb

            data = [list(visit) for visit in values.visits.rows]
            row[VISITS] = wandb.Table(columns=list(values.visits.columns), data=data)
        if self._rows is None and self._begin_at > self._run.step:
            self._run.log(row, step=self._begin_at, commit=True)
        elif self._rows is None:
            self._run.log(row)
        else:
            self._rows.put(values.step, row)

    def alert(self, notice: AlertNotice) -> None:
        """A W&B alert, of the level WARN or ERROR."""
        title = (
            notice.title if len(notice.title) <= _TITLE_LENGTH else notice.title[: _TITLE_LENGTH - 1] + "…"
        )
        self._run.alert(title=title, text=alert_text(notice), level=_LEVELS[notice.severity])

    def close(self) -> None:
        """End the run where it is loopscope's own; else only place what waits."""
        if self._rows is not None:
            self._rows.finish()
            if self._rows.lost:
                raise LoopscopeError(
                    f"{self._rows.lost} rows found no place in the W&B run {self._run.id}, whose step was ahead of the "
                    "training's; the run's own rows are complete. Resume into a new W&B run."
                )
        if self._is_own:
            self._run.finish()


def start(begin: TrackerStart) -> WandbTracker:
    """Join the run that is under way, or start one.

    Raises:
        ConfigError: the run that is to be shared has ended.
        wandb.Error: W&B could not start: no key and not offline, no network, no such project.
    """
    import wandb

    shared = begin.shared if begin.shared is not None else wandb.run
    if shared is not None and getattr(shared, "_is_finished", False):
        raise ConfigError("the W&B run to share has ended already; expected one that is under way")
    run = shared if shared is not None else _own_run(begin)
    # Online, the server says at which step a resumed run goes on.
    unknown = shared is None and getattr(run, "offline", False)
    begin_at = logged_before(begin.out, begin.attempt) if unknown else 0
    tracker = WandbTracker(run, is_own=shared is None, begin_at=begin_at)
    run.define_metric(STEP)
    # What a notebook needs to find the rows: config.loopscope.run_id, with loopscope/step as their step.
    about = {
        "run_id": begin.run_id,
        "run_name": begin.run_name,
        "path": str(begin.out.resolve()),
        "version": begin.version,
        "attempt": begin.attempt,
        # Not where alerts go: the address of a webhook is a secret.
        "config": {name: value for name, value in begin.config.items() if name != "alerts"},
    }
    run.config.update({"loopscope": about}, allow_val_change=True)
    return tracker


def _own_run(begin: TrackerStart) -> Any:
    import wandb

    def word(name: str, otherwise: str | None) -> Any:
        # What the environment says is the user's word; an argument of ours would win over it.
        return os.environ.get("WANDB_" + name, otherwise)

    return wandb.init(
        project=word("PROJECT", "loopscope"),
        name=word("NAME", begin.run_name),
        id=word("RUN_ID", begin.run_id),
        resume=word("RESUME", "allow"),
        dir=word("DIR", str(begin.out)),
        mode=word("MODE", None),
        # Without a bound, the end of training waits for an upload for as long as the network is gone.
        settings=wandb.Settings(
            **({"finish_timeout": 20} if "finish_timeout" in wandb.Settings.model_fields else {})
        ),
    )


def _place(run: Any) -> str:
    if getattr(run.settings, "mode", None) == "disabled":
        return f"run {run.id}, which WANDB_MODE=disabled keeps from writing anything"
    if address := getattr(run, "url", None):
        return str(address)
    folder = getattr(run.settings, "sync_dir", None)
    return f"run {run.id}, offline in {folder}" if folder else f"run {run.id}"

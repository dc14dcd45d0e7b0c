"""The alert rules of a run: what a resumed attempt begins with, and what run.json says of them."""

import logging
from collections.abc import Mapping
from typing import Any

from loopscope.alerts import AlertConfig, AlertObserver, NoticeSink, ReplayState, replay
from loopscope.collect import ObservedWriter, RowContext, RowWriter
from loopscope.session.config import LoopscopeConfig
from loopscope.store import RunReader, RunStore

_log = logging.getLogger("loopscope.alerts")


def alert_observer(
    writer: RowWriter,
    store: RunStore,
    config: LoopscopeConfig,
    *,
    sinks: Mapping[str, NoticeSink],
    context: RowContext,
    parent_attempt: int | None,
) -> AlertObserver:
    """The rules beside an attempt, in the state in which the attempt that it goes on with left them.

    Args:
        writer: the store's, which takes the alerts' own rows.
        store: the run.
        config: of the run.
        sinks: name → what delivers a notice.
        context: of the attempt. Rank 0 alone sends notices; the others' alerts go to their logs.
        parent_attempt: the attempt of this run whose checkpoint was loaded; None at a fresh start.
    """
    speaks = context.rank == 0
    state: ReplayState | None = None
    unread = ""
    if speaks and parent_attempt is not None:
        try:
            state = replay.state_before(RunReader(store.path), config.alerts.rules, context.attempt)
        except Exception as error:
            if config.on_error == "raise":
                raise
            unread = f"{type(error).__name__}: {error}"
    alerts = AlertObserver(
        writer,
        sinks=sinks if speaks else {},
        config=config.alerts,
        state=state,
        run_name=config.name,
        speaks=speaks,
        on_error=config.on_error,
    )
    if unread:
        _log.warning("the run's rows could not be replayed, so the rules begin without a past: %s", unread)
        scope = {"rank": context.rank, "world_size": context.world_size, "aggregation_scope": "rank_local"}
        event = {"event": "alerts_without_past", "severity": "warn", "detail": unread}
        step = next(a.first_step for a in store.manifest.attempts if a.attempt == context.attempt)
        ObservedWriter(writer, [alerts]).append("health", {"step": step, **scope, **event})
    return alerts


def with_alerts(configuration: Mapping[str, Any], alerts: AlertConfig) -> dict[str, object]:
    """The change of run.json where an attempt is judged otherwise than the last: readers use the newest bounds."""
    own = configuration.get("loopscope")
    plain = alerts.as_plain()
    if not isinstance(own, Mapping) or own.get("alerts") == plain:
        return {}
    return {"configuration": {**configuration, "loopscope": {**own, "alerts": plain}}}

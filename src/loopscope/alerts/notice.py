"""What is told of an alert, wherever it is told."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertNotice:
    """One rule that one step broke for long enough, at one place or at many at once."""

    run_id: str
    run_name: str
    attempt: int
    step: int
    """Step at which the bound had been broken for long enough."""
    rule: str
    """Name in `loopscope.alerts.RULES`."""
    severity: Literal["warn", "critical"]
    subject: str
    """The visit or pair, in words; with many, how many and the first of them."""
    since: int
    """Step at which the bound was first broken; the earliest of all places."""
    title: str
    """What it means, as a headline."""
    text: str
    """Value and bound; at the worst place where there are many."""
    why: str
    """The bound, and why it is where it is."""
    places: tuple[str, ...] = ()
    """The places by name, the worst first, at most `MOST_PLACES` of them."""
    num_places: int = 1
    """How many places there are."""

    def headline(self) -> str:
        """One line for people: severity, run, what it means."""
        return f"[{self.severity}] {self.run_name}: {self.title}"

    def sentence(self) -> str:
        """Where, since when and how far."""
        return f"{self.subject}, since step {self.since}: {self.text}"

    def message(self) -> str:
        """Everything in three lines, for people."""
        return f"{self.headline()} (step {self.step})\n{self.sentence()}\n{self.why}"

    def plain(self) -> dict[str, object]:
        """The fields as plain types."""
        return {**asdict(self), "places": list(self.places)}

    def as_json(self) -> str:
        """The fields as a JSON object, in ASCII."""
        return json.dumps(self.plain())


MOST_PLACES = 20
"""Places that one notice names."""

NoticeSink = Callable[[AlertNotice], None]
"""Delivers a notice, and raises where it cannot. Called in a thread of its own."""

"""The rules' names, for whoever must know them before the rules themselves."""

from __future__ import annotations

import difflib

from loopscope.errors import ConfigError

RULE_NAMES = (
    "closure",
    "nonfinite",
    "coverage",
    "dropped",
    "bad_input",
    "dead_expert",
    "loop_growth",
    "loop_delta",
    "router_collapse",
    "load_entropy",
    "maxvio",
    "z",
    "token_correlation",
    "files",
    "other",
)
"""In the order in which alerts of one severity are listed: what is never normal first, then what is rare and
particular, then uneven load, which often follows from another sickness."""


def check_names(given: tuple[str, ...], setting: str) -> None:
    """Refuse a name that is no rule's.

    Raises:
        ConfigError: names it, the nearest one, and all that there are.
    """
    for name in given:
        if name not in RULE_NAMES:
            near = difflib.get_close_matches(str(name), RULE_NAMES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{setting} names {name!r}, expected rules out of {', '.join(RULE_NAMES)}.{hint}"
            )

"""What a run is judged by: the bounds of the alert rules, and the rules that are off."""

import difflib
from dataclasses import asdict, dataclass

from loopscope.catalog.rule import RuleBounds
from loopscope.catalog.rule_registry import RULES
from loopscope.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertSettings(RuleBounds):
    """Bounds of the rules. The defaults do not depend on the model's size and lie above sampling noise."""

    off: tuple[str, ...] = ()
    """Names of rules that do not judge."""

    def __post_init__(self) -> None:
        RuleBounds.__post_init__(self)
        if isinstance(self.off, str) or not isinstance(self.off, tuple | list):
            raise ConfigError(f"off is {self.off!r}, expected names of rules, such as ('maxvio',)")
        for name in self.off:
            if name not in list(RULES):
                near = difflib.get_close_matches(str(name), RULES, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"off names {name!r}, expected rules out of {', '.join(RULES)}.{hint}")
        object.__setattr__(self, "off", tuple(self.off))

    def as_plain(self) -> dict[str, object]:
        """Plain types, for run.json."""
        return {**asdict(self), "off": list(self.off)}

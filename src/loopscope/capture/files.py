"""Plans as YAML: read, and written so that they can be edited and fed back. PyYAML is imported on use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopscope.capture.errors import PlanError
from loopscope.capture.spec import CapturePlan


def load_overrides(path: str | Path) -> dict[str, Any]:
    """Overrides from a YAML file: module name or glob → fields.

    Raises:
        PlanError: the file is missing, is no YAML, holds a key twice, or is no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}; expected a YAML file with a capture plan.") from None
    return parse_overrides(text, str(path))


def parse_overrides(text: str, where: str = "plan") -> dict[str, Any]:
    """As `load_overrides`, from text."""
    yaml = _yaml()

    strict: Any = type("Strict", (yaml.SafeLoader,), {})  # the loader's own class stays as it is

    def no_twice(loader: Any, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise PlanError(
                    f"{where}, line {node.value[index][0].start_mark.line + 1}: key {key!r} stands there twice; "
                    "keep one."
                )
        return {
            key: loader.construct_object(value, deep=True)
            for key, (_, value) in zip(keys, node.value, strict=True)
        }

    strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, no_twice)
    try:
        found = yaml.load(text, Loader=strict)
    except yaml.YAMLError as error:
        raise PlanError(f"{where}: {error}") from None
    if found is not None and not isinstance(found, Mapping):
        raise PlanError(f"{where} holds a {type(found).__name__}, expected a mapping: module name → fields.")
    return dict(found or {})


def dump_plan(plan: CapturePlan) -> str:
    """The plan as YAML; reading it back over the same derived plan gives the same plan.

    Custom reducers are left out: a file names them by import path, a bound one may have none.
    """
    plain = {name: spec.plain() for name, spec in plan.items()}
    return str(_yaml().safe_dump(plain, sort_keys=False, width=110))


def _yaml() -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise PlanError("plans in YAML need PyYAML; install it with `pip install pyyaml`.") from None
    return yaml

"""`loopscope generate`: every generated file of the repository, from the catalogue."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loopscope.catalog.docs import metrics_page, rules_table, tracker_keys
from loopscope.cli.console import make_console
from loopscope.errors import SchemaError
from loopscope.store.documents import check_published, schema_documents

_SECTIONS = {
    "docs/alerts.md": {"alert rules": rules_table},
    "docs/trackers.md": {"tracker keys": tracker_keys},
}
"""Page → the parts of it that are generated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """Write what derives from the catalogue: schemas/, docs/metrics.md, the marked tables of other pages."""

    check: bool = False
    """Write nothing; exit with 1 where a file differs from what would be written."""
    folder: Path = Path()
    """The repository."""

    def run(self) -> int:
        """Write or check; 1 where a file differs, or a published schema would change its columns."""
        console = make_console()
        faults = list(_missing_code())
        for name, text in {**documents(), **dict(_pages(self.folder))}.items():
            path = self.folder / name
            there = path.read_text(encoding="utf-8") if path.exists() else None
            if there == text:
                continue
            if there is not None and path.parent.name == "schemas":
                try:
                    check_published(path.name, there, text)
                except SchemaError as error:
                    faults.append(str(error))
                    continue
            if self.check:
                faults.append(f"{name} differs from the catalogue: run `loopscope generate`")
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            console.print(f"written: {name}", markup=False)
        for fault in faults:
            console.print(fault, markup=False)
        return 1 if faults else 0


def documents() -> dict[str, str]:
    """Path in the repository → what the file must hold."""
    return {
        **{f"schemas/{name}": text for name, text in schema_documents().items()},
        "docs/metrics.md": metrics_page(),
    }


def section(name: str, text: str) -> str:
    """A generated part of a page that people write, between the comments that mark it."""
    return f"<!-- generated: {name} -->\n{text}\n<!-- end: {name} -->"


def _pages(folder: Path) -> Iterator[tuple[str, str]]:
    """(path, what it must hold) of every page with generated parts."""
    for name, parts in _SECTIONS.items():
        page = (folder / name).read_text(encoding="utf-8") if (folder / name).exists() else ""
        for part, make in parts.items():
            marks = section(part, "\n").split("\n\n\n")
            page = re.sub(
                ".*?".join(marks), section(part, make()).replace("\\", r"\\"), page, flags=re.DOTALL
            )
        if page:
            yield name, page


def _missing_code() -> Iterator[str]:
    """Declared columns that nothing computes, and computations that nothing declares; needs torch."""
    try:
        import loopscope.metrics.registry  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
    except SchemaError as error:
        yield str(error)

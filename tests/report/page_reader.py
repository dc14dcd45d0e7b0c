"""A report, taken apart as a browser would."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


@dataclass
class Shown:
    """A piece of the page: its text and the targets of its links."""

    text: str = ""
    links: list[str] = field(default_factory=list)


class Page(HTMLParser):
    """Elements, their attributes, and the text between them."""

    def __init__(self, page: Path | str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.figures: dict[str, Shown] = {}
        """Chart → what its figure shows."""
        self.glossary: dict[str, str] = {}
        """Anchor of a definition → its text."""
        self._inside = ""
        self._figure: Shown | None = None
        self._entry: str | None = None
        self.feed(page if isinstance(page, str) else page.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        given = dict(attrs)
        if tag == "figure":
            self._figure = self.figures[given["id"]] = Shown()
        elif tag == "div":
            self._entry = given["id"] if (given.get("id") or "").startswith("m-") else None
        elif tag == "a" and self._figure is not None:
            self._figure.links.append(given["href"])
        if tag in ("script", "style"):
            (self.scripts if tag == "script" else self.styles).append("")

    def handle_endtag(self, tag):
        self._inside = ""
        if tag == "figure":
            self._figure = None
        elif tag == "div":
            self._entry = None

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "style":
            self.styles[-1] += data
        else:
            self.text += data
            if self._figure is not None:
                self._figure.text += data
            if self._entry is not None:
                self.glossary[self._entry] = self.glossary.get(self._entry, "") + data

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.tags if attributes.get("id")]

    @property
    def charts(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])

    def rows(self, chart: str) -> list[dict[str, Any]]:
        data = self.charts[chart]["data"]
        rows = zip(*data["values"], strict=True)
        return [dict(zip(data["columns"], row, strict=True)) for row in rows]

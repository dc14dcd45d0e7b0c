"""Writes the documents of the corpus `varied`: `python probes/make_varied.py NEW_FOLDER`, then build its manifest.

    python probes/make_varied.py /tmp/varied
    loopscope corpus build /tmp/varied --licence code=PSF-2.0 prose=PSF-2.0 ... --description "..."

Code and most of the prose are excerpts of the Python standard library (its modules, and the language reference
that `pydoc` carries); structured text and the rest are made here from fixed seeds. Another Python version gives
other excerpts: what counts is what lies in probes/varied, whose hashes its manifest fixes.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

LENGTH = 1300
"""Characters of a document, up to the end of its line."""

MODULES = (
    *("argparse", "ast", "bisect", "calendar", "cmd", "codecs", "configparser", "contextlib", "copy", "csv"),
    *(
        "dataclasses",
        "difflib",
        "fractions",
        "functools",
        "heapq",
        "inspect",
        "ipaddress",
        "mailbox",
        "pickle",
    ),
    *("random", "sched", "shlex", "statistics", "textwrap", "zipapp", "turtle"),
)
TOPICS = (
    *("assignment", "attribute-access", "binary", "calls", "class", "comparisons"),
    *("compound", "customization", "execmodel", "formatstrings", "function", "identifiers"),
    *("import", "naming", "objects", "sequence-types", "specialnames", "strings"),
    *("try", "types", "with"),
)


def excerpt(text: str, start: int) -> str:
    """`LENGTH` characters of whole lines from the first line that begins after `start`."""
    begin = text.index("\n", start) + 1
    end = text.find("\n", begin + LENGTH)
    return text[begin : len(text) if end < 0 else end + 1]


def code() -> Iterator[tuple[str, str]]:
    """One excerpt of each module, from its first third, where the code of most has begun."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES:
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        yield name, excerpt(text, len(text) // 3)


def prose() -> Iterator[tuple[str, str]]:
    """The beginning of each topic, then verses that repeat themselves."""
    for name in TOPICS:
        yield f"reference-{name}", excerpt(topics[name], 0)
    for number in range(4):
        yield f"verses-{number}", _verses(random.Random(f"verses {number}"))


def _verses(draw: random.Random) -> str:
    who = ("the miller", "a sailor", "my sister", "the teacher", "an old friend", "the smith")
    what = ("a lamp", "a loaf", "a letter", "some salt", "a basket", "a rope")
    where = ("over the bridge", "down to the harbour", "up the long hill", "through the orchard")
    lines: list[str] = []
    while sum(map(len, lines)) < LENGTH:
        person, thing, way = draw.choice(who), draw.choice(what), draw.choice(where)
        lines += [
            f"Early one morning {person} went {way},",
            f"carrying {thing} and humming a song.",
            "Who will be waiting, and who will be late?",
            f"No one is waiting, said {person}, for long.",
            "",
        ]
    return "\n".join(lines)


def structured() -> Iterator[tuple[str, str]]:
    """Four documents of each kind, each from a seed of its own."""
    kinds: tuple[Callable[[random.Random], str], ...] = (
        _csv,
        _log,
        _records,
        _settings,
        _table,
        _inventory,
        _dump,
    )
    for kind in kinds:
        for number in range(4):
            name = f"{kind.__name__.strip('_')}-{number}"
            draw, lines = random.Random(name), [""]
            while sum(map(len, lines)) < LENGTH:
                lines.append(kind(draw))
            yield name, "\n".join(lines[1:]) + "\n"


def _csv(draw: random.Random) -> str:
    place = draw.choice(("north", "south", "harbour", "airport", "ridge"))
    weather = draw.choice(("dry", "rain", "fog"))
    day = f"2024-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
    return f"{day},{place},{draw.gauss(11, 6):.1f},{draw.randint(970, 1040)},{weather}"


def _log(draw: random.Random) -> str:
    level = draw.choices(("INFO", "WARN", "ERROR"), (8, 2, 1))[0]
    what = draw.choice(("request finished", "cache miss", "retry scheduled", "connection closed"))
    clock = f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02}:{draw.randint(0, 59):02}.{draw.randint(0, 999):03}"
    return f"{clock} {level:<5} worker-{draw.randint(1, 6)} {what} in {draw.expovariate(0.02):.1f} ms"


def _records(draw: random.Random) -> str:
    kind, tag = draw.choice(("book", "map", "film")), draw.choice(("art", "sea", "war"))
    size, lent = draw.choice(("short", "long")), draw.choice(("true", "false"))
    return (
        f'{{"id": {draw.randint(1000, 9999)}, "kind": "{kind}", "year": {draw.randint(1890, 2024)}, '
        f'"tags": ["{tag}", "{size}"], "lent": {lent}}}'
    )


def _settings(draw: random.Random) -> str:
    section, enabled = (
        draw.choice(("server", "cache", "mail", "backup", "metrics")),
        draw.choice(("yes", "no")),
    )
    return (
        f"[{section}.{draw.randint(1, 40)}]\nenabled = {enabled}\ntimeout = {draw.randint(1, 120)}s\n"
        f"retries = {draw.randint(0, 9)}\npath = /srv/{section}/{draw.randint(100, 999)}\n"
    )


def _table(draw: random.Random) -> str:
    metal, state = (
        draw.choice(("iron", "copper", "tin", "zinc", "lead")),
        draw.choice(("sold", "held", "due")),
    )
    return f"| {metal:<8} | {draw.randint(1, 99):>4} t | {draw.uniform(100, 9000):>9.2f} | {state:<5} |"


def _inventory(draw: random.Random) -> str:
    part, day = draw.choice(("bolt", "nut", "washer", "screw")), draw.choice(("monday", "tuesday", "friday"))
    return (
        f"item: {part} M{draw.randint(2, 16)}x{draw.randint(6, 90)}\n  count: {draw.randint(0, 5000)}\n"
        f"  shelf: {draw.choice('ABCDEF')}{draw.randint(1, 40)}\n  checked: {day}"
    )


def _dump(draw: random.Random) -> str:
    return " ".join(f"{draw.randrange(2**16):04x}" for _ in range(12))


def main(folder: Path) -> None:
    """Write <folder>/<domain>/<name>.txt; an existing folder is refused."""
    folder.mkdir(parents=True)
    for domain, documents in (("code", code()), ("prose", prose()), ("structured", structured())):
        (folder / domain).mkdir()
        for name, text in documents:
            (folder / domain / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Writes the documents of the corpus `balanced`: `python probes/make_balanced.py NEW_FOLDER`, then build its manifest.

    python probes/make_balanced.py /tmp/balanced
    loopscope corpus build /tmp/balanced --licence code=PSF-2.0 prose=PSF-2.0 prose/song=CC0-1.0 structured=CC0-1.0
        --description "..."

As many documents in every cell of domain × repetition bucket. Code, and prose of low and middling repetition, are
excerpts of the Python standard library and of the language reference that `pydoc` carries; songs and structured text
are made here from fixed seeds. Another Python version gives other excerpts: what counts is what lies in
probes/balanced, whose hashes its manifest fixes.
"""

from __future__ import annotations

import io
import itertools
import random
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from loopscope.probe import bucket_of, repetition_rate

PER_CELL = 12
"""Documents of every domain × bucket."""
LENGTH = 900
"""Characters of a document, up to the end of its line."""
BUCKETS = ("low", "mid", "high")
_SKIPPED = {
    *(
        "site-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "pydoc_data",
        "distutils",
        "config",
    ),
    "encodings",  # its modules are copies of each other
}
_SYLLABLES = (
    *("ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "va", "we"),
    *("xi", "yo", "zu", "ark", "eld", "ist", "orn", "umb"),
)


def windows(text: str) -> Iterator[str]:
    """Whole lines of at least `LENGTH` characters, from every fourth line on."""
    lines = text.splitlines(keepends=True)
    for start in range(0, len(lines), 4):
        taken, end = "", start
        while end < len(lines) and len(taken) < LENGTH:
            taken += lines[end]
            end += 1
        if len(taken) >= LENGTH:
            yield taken


def runs_of_code(source: str) -> list[str]:
    """The parts of a module between strings of several lines, such as docstrings."""
    lines = source.splitlines(keepends=True)
    told = [False] * len(lines)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and token.end[0] > token.start[0]:
            told[token.start[0] - 1 : token.end[0]] = [True] * (token.end[0] - token.start[0] + 1)
    groups = itertools.groupby(zip(told, lines, strict=True), key=lambda pair: pair[0])
    return ["".join(line for _, line in group) for inside, group in groups if not inside]


def is_code(text: str) -> bool:
    """True where next to nothing is comment."""
    return len("".join(re.sub(r"#.*", "", text).split())) >= 0.95 * len("".join(text.split()))


def is_prose(text: str) -> bool:
    """True where nearly all is letters, spaces and the marks of a sentence."""
    return len(re.sub(r"[A-Za-z ,.;:'()\n-]", "", text)) <= 0.06 * len(text)


def chosen(
    sources: list[tuple[str, list[str]]], fits: Callable[[str], bool], rng: random.Random
) -> dict[str, list[tuple[str, str]]]:
    """Bucket → (name, excerpt); each source gives one excerpt at most, the rarest buckets choose first."""
    found: dict[str, list[tuple[str, str]]] = {bucket: [] for bucket in BUCKETS}
    used: set[str] = set()
    for bucket in ("high", "low", "mid"):
        for name, parts in rng.sample(sources, len(sources)):
            if name in used or len(found[bucket]) == PER_CELL:
                continue
            fitting = [
                one
                for part in parts
                for one in windows(part)
                if bucket_of(repetition_rate(one)) == bucket and fits(one)
            ]
            if fitting:
                used.add(name)
                found[bucket].append((name, rng.choice(fitting)))
    return found


def code() -> dict[str, list[tuple[str, str]]]:
    """Excerpts of modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = []
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if _SKIPPED.isdisjoint(inside.parts[:-1]) and not inside.name.startswith("_sysconfigdata"):
            name = "-".join((*inside.parts[:-1], inside.stem)).strip("_")
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.isascii():
                sources.append((name, runs_of_code(text)))
    return chosen(sources, is_code, random.Random("code"))


def prose() -> dict[str, list[tuple[str, str]]]:
    """Excerpts of the language reference; songs, which repeat themselves."""
    sources = [(f"reference-{name}", [text]) for name, text in sorted(topics.items())]
    found = chosen(sources, is_prose, random.Random("prose"))
    found["high"] = made((_ballad, _litany, _tale, _rounds), "high", prefix="song-")
    return found


def structured() -> dict[str, list[tuple[str, str]]]:
    """Logs, tables, records, and lists in which next to nothing comes twice."""
    kinds = (
        _dump,
        _readings,
        _index,
        _ledger,
        _csv,
        _records,
        _inventory,
        _settings,
        _log,
        _table,
        _matches,
        _grid,
    )
    return {bucket: made(kinds, bucket) for bucket in BUCKETS}


def made(
    kinds: tuple[Callable[[random.Random], str], ...], bucket: str, prefix: str = ""
) -> list[tuple[str, str]]:
    """Documents of a bucket, kind by kind in turn; each has a seed of its own."""
    found: list[tuple[str, str]] = []
    for number in range(40):
        for kind in kinds:
            name = f"{prefix}{kind.__name__.strip('_')}-{number}"
            draw, text = random.Random(name), ""
            while len(text) < LENGTH:
                text += kind(draw) + "\n"
            if len(found) < PER_CELL and bucket_of(repetition_rate(text)) == bucket:
                found.append((name, text))
    return found


def _word(draw: random.Random) -> str:
    return "".join(draw.choice(_SYLLABLES) for _ in range(draw.randint(2, 4)))


def _ballad(draw: random.Random) -> str:
    who, way = (
        draw.choice(("the miller", "a sailor", "my sister")),
        draw.choice(("to the sea", "over the hill")),
    )
    return (
        f"And {who} went singing {way} in the rain,\nsinging and walking, and home once again.\n"
        "Who will be waiting, and who will be late?\nNo one is waiting, no one at the gate.\n"
    )


def _litany(draw: random.Random) -> str:
    what = draw.choice(
        ("the roof", "the river", "the orchard", "the road", "the lamp", "the oven", "the field")
    )
    return f"May {what} be spared by the winter and kept by the spring."


def _tale(draw: random.Random) -> str:
    chain = [
        "the grain that lay in the barn",
        "the mouse that ate",
        "the cat that caught",
        "the dog that chased",
    ]
    depth = draw.randint(2, len(chain))
    return f"This is {', '.join(reversed(chain[1:depth]))} {chain[0]}; and the barn stood on the hill.\n"


def _rounds(draw: random.Random) -> str:
    count = draw.randint(2, 9)
    return (
        f"{count} boats on the water, {count} boats on the tide;\none of them turned and came to my side,\n"
        "and all of the others went on with the wind.\n"
    )


def _dump(draw: random.Random) -> str:
    return " ".join(f"{draw.randrange(2**16):04x}" for _ in range(12))


def _readings(draw: random.Random) -> str:
    return "  ".join(f"{draw.uniform(0, 5000):9.3f}" for _ in range(6))


def _index(draw: random.Random) -> str:
    return f"{_word(draw)} {_word(draw)} {draw.randint(10, 9999)} {draw.randint(10, 9999)}"


def _ledger(draw: random.Random) -> str:
    return f"{draw.randint(10**5, 10**6)} {_word(draw).title()} {_word(draw)} {draw.randint(1, 10**5)} {_word(draw)}"


def _csv(draw: random.Random) -> str:
    place = draw.choice(("north", "south", "harbour", "airport", "ridge"))
    day = f"2024-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
    return f"{day},{place},{draw.gauss(11, 6):.1f},{draw.randint(970, 1040)},{draw.choice(('dry', 'rain', 'fog'))}"


def _records(draw: random.Random) -> str:
    return (
        f'{{"id": {draw.randint(1000, 9999)}, "name": "{_word(draw)}", "year": {draw.randint(1890, 2024)}, '
        f'"lent": {draw.choice(("true", "false"))}}}'
    )


def _inventory(draw: random.Random) -> str:
    part = draw.choice(("bolt", "nut", "washer", "screw"))
    return f"item: {part} M{draw.randint(2, 16)}x{draw.randint(6, 90)}\n  count: {draw.randint(0, 5000)}"


def _settings(draw: random.Random) -> str:
    section = draw.choice(("server", "cache", "mail", "backup"))
    times = f"timeout = {draw.randint(1, 120)}s\nretries = {draw.randint(0, 9)}"
    return f"[{section}.{_word(draw)}]\nenabled = yes\n{times}\n"


def _log(draw: random.Random) -> str:
    what = draw.choice(("request finished", "cache miss", "retry scheduled", "connection closed"))
    clock = f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02}:{draw.randint(0, 59):02}"
    return f"{clock} INFO worker-{draw.randint(1, 6)} {what} in {draw.expovariate(0.02):.1f} ms"


def _table(draw: random.Random) -> str:
    metal, state = draw.choice(("iron", "copper", "tin", "zinc")), draw.choice(("sold", "held", "due"))
    return f"| {metal:<8} | {draw.randint(1, 99):>4} t | {draw.uniform(100, 9000):>9.2f} | {state:<5} |"


def _matches(draw: random.Random) -> str:
    goals = f"{draw.randint(0, 5)} : {draw.randint(0, 5)} ({draw.randint(1, 90)}')"
    return f"{_word(draw).title()} - {_word(draw).title()} {goals}"


def _grid(draw: random.Random) -> str:
    return "".join(draw.choice(". . . # o") for _ in range(48))


def main(folder: Path) -> None:
    """Write <folder>/<domain>/<name>.txt; an existing folder is refused."""
    folder.mkdir(parents=True)
    for domain, cells in (("code", code()), ("prose", prose()), ("structured", structured())):
        (folder / domain).mkdir()
        for bucket, documents in cells.items():
            if len(documents) != PER_CELL:
                raise SystemExit(f"{domain}, {bucket}: {len(documents)} documents, expected {PER_CELL}")
            for name, text in documents:
                (folder / domain / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

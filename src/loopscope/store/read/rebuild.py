"""A run's identity and attempts: what run.json says or, where it is lost, its parts and journals alone."""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from loopscope.errors import NotARunError, SchemaError, StoreError
from loopscope.store.attempts import chain_faults, merge_attempts, read_attempts
from loopscope.store.journal.frames import JournalHeader, journal_header, refusal
from loopscope.store.manifest import LAYOUT, Attempt, Manifest, read_manifest
from loopscope.store.names import ATTEMPTS_DIR, JOURNAL_DIR, MANIFEST
from loopscope.store.parts.parquet import PartMeta, arrow_source
from loopscope.store.read.files import Problem, RunFiles
from loopscope.store.schema import TableSchema


def open_manifest(
    root: Path, files: RunFiles, tables: Mapping[str, TableSchema]
) -> tuple[Manifest, list[Problem]]:
    """The manifest, and what is wrong with it.

    Raises:
        NotARunError: there is none, and no row to rebuild it from.
        SchemaError: the run has a layout that this version reads no more.
    """
    try:
        manifest = read_manifest(root)
    except SchemaError:
        raise
    except StoreError as error:
        rebuilt = rebuild_manifest(files, tables)
        if rebuilt is None:
            if isinstance(error, NotARunError):
                raise
            raise NotARunError(f"{error}; and no row was found to rebuild it from") from None
        text = f"missing or invalid ({error}); identity and attempts were rebuilt from the rows"
        return rebuilt, [Problem("manifest", MANIFEST, text)]
    if manifest.format <= LAYOUT:
        return manifest, []
    text = (
        f"has layout {manifest.format}, written by loopscope {manifest.loopscope_version}; this version knows "
        f"layout {LAYOUT}: what it reads is right as far as it goes, and may not be all"
    )
    return manifest, [Problem("schema", MANIFEST, text, 0)]


def open_attempts(root: Path, manifest: Manifest, files: RunFiles) -> tuple[list[Attempt], list[Problem]]:
    """Every attempt that the folder or run.json knows, and what is wrong with them."""
    found, faults = read_attempts(root)
    attempts = merge_attempts(found, manifest.attempts)
    there = {part.segment for part in chain.from_iterable(files.parts.values())} | files.journals.keys()
    lost = sorted({segment.attempt for segment in there} - {attempt.attempt for attempt in attempts})
    faults += chain_faults(attempts)
    faults += [f"attempt {n} has rows but is recorded nowhere; its rows are not live" for n in lost]
    problems = [Problem("attempt", ATTEMPTS_DIR, fault) for fault in faults]
    text = "was sealed although some of it could not be read; kept for inspection"
    return attempts, problems + [
        Problem("journal", f"{JOURNAL_DIR}/{name}", text, 0) for name in files.damaged
    ]


def rebuild_manifest(files: RunFiles, tables: Mapping[str, TableSchema]) -> Manifest | None:
    """What the rows say of their run; None where no file that this version reads says anything."""
    sources: list[PartMeta | JournalHeader] = []
    for part in (part for parts in files.parts.values() for part in parts):
        try:
            meta = PartMeta.decode(pq.read_schema(arrow_source(part.path)).metadata)
        except (OSError, ValueError, pa.ArrowException):
            continue
        if part.table not in tables or meta.schema_version >= tables[part.table].oldest:
            sources.append(meta)
    headers = [header for data in files.journals.values() if (header := journal_header(data)) is not None]
    sources += [header for header in headers if not refusal(header, tables)]
    if not sources:
        return None
    ((run_id, _),) = Counter(source.run_id for source in sources).most_common(1)
    # A later source of an attempt replaces an earlier one; they say the same.
    attempts = {
        source.attempt: Attempt(
            attempt=source.attempt,
            parent_attempt=source.parent_attempt,
            first_step=source.first_step,
            world_size=source.world_size,
            loopscope_version=source.loopscope_version,
        )
        for source in sources
    }
    return Manifest(
        run_id=run_id,
        run_name=files.root.name,
        created=datetime.fromtimestamp(int(run_id.replace("-", "")[:12], 16) / 1000, UTC),
        attempts=[attempts[number] for number in sorted(attempts)],
        rebuilt=True,
    )

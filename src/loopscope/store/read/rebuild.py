"""Identity and attempts of a run whose run.json is lost, from its parts and journals alone."""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq

from loopscope.store.journal.frames import JournalHeader, journal_header, refusal
from loopscope.store.manifest import Attempt, Manifest
from loopscope.store.parts.parquet import PartMeta
from loopscope.store.read.files import RunFiles
from loopscope.store.schema import TableSchema


def rebuild_manifest(files: RunFiles, tables: Mapping[str, TableSchema]) -> Manifest | None:
    """What the rows say of their run; None where no file that this version reads says anything."""
    sources: list[PartMeta | JournalHeader] = []
    for part in (part for parts in files.parts.values() for part in parts):
        try:
            meta = PartMeta.decode(pq.read_schema(part.path).metadata)
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

"""Turns plain text into what torchtitan trains on: a byte-level BPE tokenizer folder and a local dataset.

Nothing here needs torch until `register_dataset`; `loopscope train` prepares the text before the ranks start.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopscope.errors import ConfigError, StoreError
from loopscope.integrations.torchtitan.text_sources import documents, stdlib_files, user_files

DATASET_NAME = "loopscope_text"
"""Name under which the local text is known to torchtitan's data loader."""

BOS_TOKEN = "<|begin|>"
EOS_TOKEN = "<|end|>"
VOCAB_SIZE = 2048
"""Vocabulary of the ready configurations, stated here so that a text can be prepared without torch."""
MIN_VOCAB_SIZE = 258
"""256 bytes and the two markers: below this a byte-level tokenizer cannot spell every text."""

# Enough for a stable small vocabulary, whatever the size of the user's text.
_BPE_TRAINING_CHARS = 16_000_000
_FORMAT = 1
_MANIFEST = "text.json"
_DATA_FILE = "documents.arrow"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedText:
    """A text that is ready to be trained on."""

    tokenizer_path: Path
    """Folder that torchtitan's tokenizer loader reads (`hf_assets_path`)."""
    dataset_path: Path
    """Arrow file of the documents (`dataloader.dataset_path`)."""
    vocab_size: int
    """Tokens in the vocabulary; less than asked for where the text is too small to fill it."""
    sha256: str
    """Hash of the documents, the vocabulary's size and the format, in hexadecimal."""
    num_documents: int
    """Documents; a job needs at least one for each data-parallel rank."""
    source: str
    """What the text is, for people."""


def prepare_text(text: Path | None, cache_dir: Path, vocab_size: int) -> PreparedText:
    """Read the text, train a byte-level BPE on it, and keep both below `cache_dir`, keyed by content.

    Args:
        text: a UTF-8 file or a folder of such files; None takes the Python standard library's sources.
        cache_dir: where results are kept; a text is prepared once for each size. Safe for several processes.
        vocab_size: tokens wanted, the 256 bytes and two markers included.

    Raises:
        ConfigError: the text is missing, empty, unreadable or not UTF-8, or vocab_size is below 258.
        StoreError: `cache_dir` cannot be written.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size is {vocab_size}, expected >= {MIN_VOCAB_SIZE} (256 bytes and the markers "
            f"{BOS_TOKEN} and {EOS_TOKEN}). Take a larger vocabulary."
        )
    found = list(documents(stdlib_files() if text is None else user_files(text)))
    digest = _content_hash(found, vocab_size)
    target = cache_dir / f"text-{digest[:16]}"
    if not (target / _MANIFEST).is_file():
        try:
            _build(found, target, vocab_size=vocab_size, digest=digest)
        except OSError as error:
            raise StoreError(
                f"cannot write the prepared text to {target} ({error.strerror or error}). Expected a "
                "writable folder with some free space; choose another output folder."
            ) from error
    return PreparedText(
        tokenizer_path=target / "tokenizer",
        dataset_path=target / _DATA_FILE,
        vocab_size=json.loads((target / _MANIFEST).read_text())["vocab_size"],
        sha256=digest,
        num_documents=len(found),
        source="Python standard library" if text is None else str(text),
    )


def register_dataset(name: str, path: Path | str) -> None:
    """Make the documents at `path` known to torchtitan's text data loader as `name`. May be called again.

    Raises:
        ConfigError: `path` is no file, or `name` belongs to a dataset that loopscope did not register.
    """
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    if not Path(path).is_file():
        raise ConfigError(
            f"the prepared text {path} does not exist; expected the Arrow file that prepare_text() wrote."
        )
    name = name.lower()  # torchtitan lowers the name that it looks up
    known = DATASETS.get(name)
    if known is not None and known.loader is not _load_documents:
        raise ConfigError(
            f"the dataset name {name!r} already belongs to torchtitan's own {known.path!r}; expected a free "
            f"name. Use {DATASET_NAME!r}."
        )
    DATASETS[name] = DatasetConfig(path=str(path), loader=_load_documents, sample_processor=_text_of)


def _load_documents(path: str) -> Any:
    # Memory-mapped and map-style: torchtitan can skip to a position when it resumes, and nothing is copied
    # into a cache folder of its own.
    from datasets import Dataset

    return Dataset.from_file(path)


def _text_of(sample: dict[str, Any]) -> str:
    return str(sample["text"])


def _content_hash(found: list[tuple[str, str]], vocab_size: int) -> str:
    digest = hashlib.sha256(f"loopscope-text {_FORMAT} {vocab_size}\n".encode())
    for name, piece in found:
        raw = piece.encode()
        digest.update(f"{name} {len(raw)}\n".encode())
        digest.update(raw)
    return digest.hexdigest()


def _build(found: list[tuple[str, str]], target: Path, *, vocab_size: int, digest: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Made aside and renamed whole: another process sees all of it or nothing.
    work = Path(tempfile.mkdtemp(prefix=".text-", suffix=".tmp", dir=target.parent))
    try:
        _write_documents(found, work / _DATA_FILE)
        size = _train_tokenizer((piece for _, piece in found), work / "tokenizer", vocab_size)
        manifest = {"format": _FORMAT, "sha256": digest, "vocab_size": size, "num_documents": len(found)}
        (work / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not (target / _MANIFEST).is_file():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_documents(found: list[tuple[str, str]], path: Path) -> None:
    import pyarrow as pa

    schema = pa.schema([("name", pa.string()), ("text", pa.string())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for start in range(0, len(found), 256):
            names, texts = zip(*found[start : start + 256], strict=True)
            writer.write_batch(pa.record_batch([list(names), list(texts)], schema=schema))


def _train_tokenizer(texts: Iterable[str], folder: Path, vocab_size: int) -> int:
    # Ranks fork and share few cores, so its threads stay off; the caller shows progress, if any.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_up_to(texts, _BPE_TRAINING_CHARS), trainer=trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return int(tokenizer.get_vocab_size())


def _up_to(texts: Iterable[str], chars: int) -> Iterable[str]:
    seen = 0
    for piece in texts:
        yield piece
        seen += len(piece)
        if seen >= chars:
            return

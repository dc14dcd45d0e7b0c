"""Probe corpora: fixed texts, checked against their manifest, and their tokens for one tokenizer."""

from loopscope.probe.corpus import Corpus, Document, load_corpus
from loopscope.probe.encode import EncodedCorpus
from loopscope.probe.repetition import BUCKET_EDGES, bucket_of, repetition_rate

__all__ = [
    "BUCKET_EDGES",
    "Corpus",
    "Document",
    "EncodedCorpus",
    "bucket_of",
    "load_corpus",
    "repetition_rate",
]

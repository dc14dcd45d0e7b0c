import math

import numpy as np
import pytest

from loopscope.collect.corpus_losses import ProbeCorpus, loss_rows
from loopscope.errors import ProbeError

CORPUS = ProbeCorpus(
    name="tiny",
    hash="abc",
    strata={"repetition": ("low", "high", "low"), "domain": ("code", "code", "prose")},
)


def _by_stratum(rows):
    return {(row["stratum_kind"], row["stratum"]): row for row in rows}


def test_one_flat_mean_per_stratum():
    rows = _by_stratum(loss_rows(np.array([[2.0] * 4, [1.0] * 4, [1.5] * 4]), CORPUS))
    assert set(rows) == {
        ("all", "all"),
        ("repetition", "low"),
        ("repetition", "high"),
        ("domain", "code"),
        ("domain", "prose"),
    }
    assert rows["all", "all"]["loss_mean"] == 18 / 12
    assert rows["repetition", "low"]["loss_mean"] == 14 / 8
    assert rows["repetition", "low"]["num_documents"] == 2
    assert rows["domain", "prose"]["num_target_tokens"] == 4
    assert all(row["corpus_hash"] == "abc" and row["null_reasons"] is None for row in rows.values())


def test_nonfinite_loss_is_null_with_a_reason_only_where_it_belongs():
    rows = _by_stratum(loss_rows(np.array([[2.0] * 4, [1.0, math.nan, 1.0, 1.0], [1.5] * 4]), CORPUS))
    assert rows["all", "all"]["loss_mean"] is None
    assert "nonfinite" in rows["all", "all"]["null_reasons"]
    assert rows["repetition", "high"]["loss_sum"] is None
    assert rows["repetition", "low"]["loss_mean"] == 14 / 8


def test_strata_must_fit_the_documents():
    with pytest.raises(ProbeError, match="3 repetition strata, but 2 documents"):
        loss_rows(np.zeros((2, 4)), CORPUS)


def test_in_context_repetition_by_target_and_by_bigram():
    ids = np.array([[1, 2, 1, 2, 1], [3, 4, 5, 6, 7], [1, 1, 1, 1, 1]])
    losses = np.arange(12.0).reshape(3, 4)
    rows = _by_stratum(loss_rows(losses, ProbeCorpus(name="tiny", hash="abc", token_ids=ids)))
    token = {name: rows["in_context_token", name] for name in ("0", "1", "2-3", "4+")}
    # Earlier occurrences of the target: document 0: 0 1 1 2, document 1: none, document 2: 1 2 3 4.
    assert [row["num_target_tokens"] for row in token.values()] == [5, 3, 3, 1]
    assert token["0"]["loss_sum"] == 0 + 4 + 5 + 6 + 7
    assert token["4+"]["loss_mean"] == 11.0
    assert [row["num_documents"] for row in token.values()] == [2, 2, 2, 1]
    bigram = {name: rows["in_context_bigram", name] for name in ("0", "1", "2-3", "4+")}
    # Of the pair that the target ends: 0 0 1 1, none, 0 1 2 3.
    assert [row["num_target_tokens"] for row in bigram.values()] == [7, 3, 2, 0]
    assert bigram["4+"]["loss_mean"] is None
    assert "not_applicable" in bigram["4+"]["null_reasons"]


def test_token_ids_of_another_corpus():
    corpus = ProbeCorpus(name="tiny", hash="abc", token_ids=np.zeros((3, 5), dtype=np.int64))
    with pytest.raises(ProbeError, match="has 3 documents, but 2 ran"):
        loss_rows(np.zeros((2, 4)), corpus)

import math

import pytest

from loopscope.collect.strata import ProbeCorpus, loss_rows
from loopscope.errors import ProbeError

CORPUS = ProbeCorpus(
    name="tiny",
    hash="abc",
    strata={"repetition": ("low", "high", "low"), "domain": ("code", "code", "prose")},
)


def _by_stratum(rows):
    return {(row["stratum_kind"], row["stratum"]): row for row in rows}


def test_one_flat_mean_per_stratum():
    rows = _by_stratum(loss_rows([8.0, 4.0, 6.0], 4, CORPUS))
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
    rows = _by_stratum(loss_rows([8.0, math.nan, 6.0], 4, CORPUS))
    assert rows["all", "all"]["loss_mean"] is None
    assert "nonfinite" in rows["all", "all"]["null_reasons"]
    assert rows["repetition", "high"]["loss_sum"] is None
    assert rows["repetition", "low"]["loss_mean"] == 14 / 8


def test_strata_must_fit_the_documents():
    with pytest.raises(ProbeError, match="3 repetition strata, but 2 documents"):
        loss_rows([1.0, 2.0], 4, CORPUS)

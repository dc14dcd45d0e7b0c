from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscope.metrics.probe.in_context import BUCKETS, bucket_index, earlier_bigrams, earlier_targets

documents = st.integers(2, 12).flatmap(
    lambda length: st.lists(
        st.lists(st.integers(0, 4), min_size=length, max_size=length), min_size=1, max_size=4
    )
)


@settings(max_examples=60, deadline=None)
@given(documents)
def test_counts_are_those_of_walking_through_the_document(rows):
    ids = np.array(rows)
    targets, bigrams = earlier_targets(ids), earlier_bigrams(ids)
    for d, row in enumerate(rows):
        for s in range(len(row) - 1):
            assert targets[d, s] == row[: s + 1].count(row[s + 1])
            pairs = Counter(pairwise(row[: s + 1]))
            assert bigrams[d, s] == pairs[row[s], row[s + 1]]


def test_large_token_ids_do_not_collide():
    ids = np.array([[0, 2**31 - 1, 0, 2**31 - 1]])
    assert earlier_bigrams(ids).tolist() == [[0, 0, 1]]


def test_buckets():
    assert [BUCKETS[i] for i in bucket_index(np.arange(6))] == ["0", "1", "2-3", "2-3", "4+", "4+"]

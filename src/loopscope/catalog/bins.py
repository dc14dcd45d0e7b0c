"""The bins of every histogram column: fixed half octaves, so that counts merge by addition.

Bin 0 holds [0, 2^-16), bin i (1 <= i <= 62) holds [2^((i-33)/2), 2^((i-32)/2)), bin 63 holds [2^15, inf). A
difference within one unit in the last place of an edge may fall on either side of it.
"""

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 64
OFFSET = 33
"""Bin of a value of 1."""

EDGES: NDArray[np.float64] = np.concatenate([[0.0], 2.0 ** ((np.arange(1, NUM_BINS) - OFFSET) / 2), [np.inf]])
"""[NUM_BINS + 1] bin edges; bin i is [EDGES[i], EDGES[i+1])."""

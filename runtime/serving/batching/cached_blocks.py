"""What a cache holds of a request, and what a step offers it: records between the packer and the cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from moepass.runtime.serving.batching.block_hashes import RequestHashes
from moepass.runtime.serving.batching.step_batch import Indices


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class MatchedBlocks:
    """What a cache holds of a request.

    blocks          [hashes] the cache block of each hash, -1 for none
    scores_known    [hashes, BLOCK_TOKENS] whether log-probability, rank and most likely token lie beside each token
    """

    hashes: RequestHashes
    blocks: Indices
    scores_known: npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class OfferedBlocks:
    """Blocks that a step computes and the cache did not hold when it was packed, each before those behind it.

    hashes      their names
    previous    the names of the blocks before them, None for the first of a sequence
    requests    [blocks] requests of the step that have each block
    branches    [blocks] branches of the step's trie that hang on each block
    positions   [blocks, BLOCK_TOKENS] where their tokens stand in the stream
    """

    hashes: tuple[bytes, ...]
    previous: tuple[bytes | None, ...]
    requests: Indices
    branches: Indices
    positions: Indices

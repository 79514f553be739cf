"""Records between the packer and the cache: cached blocks of a request, and blocks that a step offers."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from moepass.runtime.serving.batching.block_hashes import RequestHashes
from moepass.runtime.serving.batching.step_batch import Indices


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class MatchedBlocks:
    """The cached blocks of a request.

    Attributes:
        hashes: the blocks of the request.
        blocks: [hashes] the cache block of each hash, -1 for none.
        scores_known: [hashes, BLOCK_TOKENS] whether the cache stores log-probability, rank and most likely token of
            each token.
    """

    hashes: RequestHashes
    blocks: Indices
    scores_known: npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class OfferedBlocks:
    """Blocks that a step computes and the cache does not hold, in an order with each block before its successors.

    Attributes:
        hashes: their hashes.
        previous: hashes of the blocks before them, None for the first block of a sequence.
        requests: [blocks] number of requests of the step with each block.
        branches: [blocks] number of branches of the step's trie below each block.
        positions: [blocks, BLOCK_TOKENS] indices of their tokens in the stream.
    """

    hashes: tuple[bytes, ...]
    previous: tuple[bytes | None, ...]
    requests: Indices
    branches: Indices
    positions: Indices

"""Home `hybrid`: every rank keeps 1/N of each bank in host memory, and stages of it on the compute side.

    segment of a rank   its shards of all banks, one after the other    (host memory)
                        its board: what its stages hold, what it wants  (host memory)
                        its stages, each as long as its largest shard   (memory of the compute device)

Here both are shared memory of the machine: on a CPU there is no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.models.errors import InputError
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import shard_layout, shard_pieces
from moepass.runtime.banks.banks import Bank
from moepass.runtime.homes.hybrid.stage_board import MOST_BANKS, StagingBoard, board_bytes, check_machine
from moepass.runtime.homes.hybrid.staged_pull import StagedPull, StagedSource
from moepass.runtime.homes.hybrid.stager import Stager, StagingBuffers
from moepass.runtime.homes.peer_home import PeerHome, PeerPacker
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.system.shared_memory import PAGE_BYTES, SharedSegment, in_pages
from moepass.runtime.transfer.sources import Source, whole


class HybridHome(PeerHome):
    """Shards on all ranks of a group, and stages before them."""

    def __init__(self, group: PeerGroup, transport: StagedPull) -> None:
        super().__init__(group, transport)
        self._staged = transport

    def copying(self, bank: BankSpec) -> None:
        self._staged.asked_for(bank)


class HybridPacker(PeerPacker):
    """As `PeerPacker`, with `stages` stages on each rank."""

    home_name = "hybrid"

    def __init__(self, group: PeerGroup, transport: StagedPull, stages: int) -> None:
        """Raises InputError where stages cannot be told from what they held before."""
        check_machine()
        super().__init__(group, transport)
        self.home = HybridHome(group, transport)
        self.stages = stages
        self._staged = transport
        self._stages_of: dict[int, StagingBuffers] = {}

    def agree_on(self, specs: Sequence[BankSpec], digests: Sequence[str]) -> None:
        """Raises InputError where there are more banks than a board can tell apart; else as `PeerPacker`."""
        if len(specs) > MOST_BANKS:
            raise InputError(f"home='hybrid' takes {MOST_BANKS} banks at most, and the model has {len(specs)}")
        super().agree_on(specs, digests)

    def connect(self, banks: Sequence[Bank]) -> None:
        spread = self.spread(banks)
        own = self._stages_of[self.group.rank]
        others = [stages.board for rank, stages in self._stages_of.items() if rank != self.group.rank]
        shards = [whole(bank.shard) for bank in banks]
        self._staged.connect(Stager(own, others, shards, self._staged.host_link))
        self.home.connect(spread)

    def _reserve(self) -> None:
        rank = self.group.rank
        end = self._places(rank)[-1] + in_pages(board_bytes(self.stages))
        self._segment = self.group.make_segment(end + self.stages * in_pages(self._stage_bytes(rank)) - PAGE_BYTES)
        # Now, as long as nothing is changed if there is no memory for them.
        self._map_stages(rank, self._segment)

    def _open(self, rank: int, segment: SharedSegment) -> list[torch.Tensor]:
        self._map_stages(rank, segment)
        return super()._open(rank, segment)

    def _map_stages(self, rank: int, segment: SharedSegment) -> None:
        place = self._places(rank)[-1]
        board = StagingBoard(segment.map(place, board_bytes(self.stages)), self.stages)
        place += in_pages(board_bytes(self.stages))
        nbytes = self._stage_bytes(rank)
        memories = [segment.map(place + number * in_pages(nbytes), nbytes) for number in range(self.stages)]
        self._stages_of[rank] = StagingBuffers(board, memories)
        if rank == self.group.rank:
            self.home.stage_bytes = self.stages * nbytes

    def _stage_bytes(self, rank: int) -> int:
        """Bytes of one stage of `rank`."""
        return max((shard_layout(spec, rank).nbytes for spec in self._specs), default=0)

    def _source(self, spec: BankSpec, rank: int, shard: torch.Tensor) -> Source:
        is_other = rank != self.group.rank
        return StagedSource(shard, shard_pieces(spec, rank), is_other, spec.index, self._stages_of[rank])

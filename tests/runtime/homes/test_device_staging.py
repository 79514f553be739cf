"""Home `hybrid` with staging buffers in the memory of GPUs: emulated streams, and real ranks on a CPU."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import moepass
from moepass.models.errors import OptionError
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import Piece
from moepass.runtime.banks.banks import Bank
from moepass.runtime.homes.hybrid import hybrid_home
from moepass.runtime.homes.hybrid.hybrid_home import DeviceHybridPacker
from moepass.runtime.homes.hybrid.staged_pull import StageAction, StagedPull, StagedSource, WaitLimit
from moepass.runtime.homes.hybrid.stager import DeviceStagingBuffers, StagingBuffers, _StagerWork
from moepass.runtime.homes.hybrid.staging_board import StagingBoard, board_bytes
from moepass.runtime.homes.options.packers import make_packer
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.offload import offload
from moepass.runtime.system.shared_memory import SharedSegment, open_segment
from moepass.runtime.transfer import lanes
from moepass.runtime.transfer.copier import Copier
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.lanes import StreamLane
from moepass.runtime.transfer.link import BusyLink, Link
from moepass.runtime.transfer.recording import recorded_event
from moepass.runtime.transfer.ring import Ring
from moepass.runtime.transfer.sources import Source, whole
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.processes.fake_cuda import FakeCuda
from tests.helpers.processes.late_thread import LateThread
from tests.helpers.processes.rank_memory import Segments
from tests.helpers.processes.ranks import run_ranks
from tests.helpers.processes.ring_runs import SLOT_BYTES, holds, run_banks, small_bank

CPU = torch.device("cpu")
BANKS = [small_bank(index) for index in range(5)]
RANKS = 2
BANK_BYTES = BANKS[0].spec.format.slot_bytes
SHARD_BYTES = BANK_BYTES // RANKS


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with (
        mock.patch.object(lanes, "SLICE_BYTES", 16),
        mock.patch.object(lanes, "stream_slice_bytes", return_value=48),
    ):
        yield


class _Late(StagedPull):
    """Copies are issued by a thread that may be late, which waits for no buffer to be filled."""

    def __init__(self, random: random.Random) -> None:
        super().__init__(Link())
        self._random = random

    def copy_thread(self, link: Link) -> LateThread:
        return LateThread(self._random)

    def patience(self, nbytes: int) -> WaitLimit:
        return WaitLimit(0.0, 0.0, {})


class _Wants:
    """A stand-in for the stager of the reading rank."""

    def __init__(self, board: StagingBoard) -> None:
        self._board = board

    def check(self) -> None:
        pass

    def learn(self, bank: int) -> None:
        pass

    def show_running(self, is_running: bool) -> None:
        self._board.show_running(is_running)

    def reading(self, bank: int) -> None:
        self._board.show_wants((bank, (bank + 1) % len(BANKS)))

    def has_read(self, bank: int) -> None:
        self._board.show_wants(((bank + 1) % len(BANKS), (bank + 2) % len(BANKS)))


class _Cuda(FakeCuda):
    """An emulated CUDA on which the stagers of all ranks continue while work on streams takes time."""

    meanwhile: Callable[[], object] | None = None

    def run_one(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        moment = self.moment
        if meanwhile is not None:
            meanwhile()
        if self._ready() or moment == self.moment:
            super().run_one()
        self.meanwhile = meanwhile


class _Machine(Home):
    """Two ranks on one emulated GPU. The first one reads; the second one wants different banks."""

    needs_host = True

    def __init__(self, cuda: _Cuda, boards: list[StagingBoard], random: random.Random) -> None:
        self.transport = _Late(random)
        self._random, self._boards = random, boards
        self._staging = [
            DeviceStagingBuffers(board, [cuda.empty(SHARD_BYTES) for _ in range(board.buffers)], cuda.stream(), None)
            for board in boards
        ]
        self._shards = [[bank.shard[rank * SHARD_BYTES :][:SHARD_BYTES] for bank in BANKS] for rank in range(RANKS)]
        self._stagers = [
            _StagerWork(self._staging[rank], [boards[1 - rank]], [*map(whole, self._shards[rank])], BusyLink(Link()))
            for rank in range(RANKS)
        ]
        self.transport.stager = _Wants(boards[0])  # type: ignore[assignment]
        cuda.meanwhile = self._go_on

    def _go_on(self) -> None:
        if self._random.random() < 0.1:
            self._boards[1].show_running(True)
            self._boards[1].show_wants((self._random.randrange(len(BANKS)), self._random.randrange(len(BANKS))))
        if self._random.random() < 0.7:
            self._random.choice(self._stagers).step()

    def sources(self, bank: BankSpec, shards: object) -> tuple[Source, ...]:
        return tuple(
            StagedSource(
                self._shards[rank][bank.index],
                (Piece(0, rank * SHARD_BYTES, SHARD_BYTES),),
                rank != 0,
                bank.index,
                self._staging[rank],
            )
            for rank in (1, 0)
        )


def _run(seed: int, slots: int, order: list[int]) -> tuple[int, int, int]:
    """Return the number of wrong reads, and the bytes from staging buffers and from host memory."""
    wrong: list[str] = []
    # With one buffer, each rank holds the bank that it wants itself.
    buffers = 1 + seed % 2
    boards = [StagingBoard(torch.zeros(board_bytes(buffers), dtype=torch.uint8), buffers) for _ in range(RANKS)]

    def check(tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
        if not holds(tensors, bank):
            wrong.append(bank.spec.name)

    with _Cuda(random.Random(seed)).installed() as cuda:
        assert isinstance(cuda, _Cuda)
        home = _Machine(cuda, boards, random.Random(seed))
        ring = Ring(
            slots, SLOT_BYTES, CPU, Copier(StreamLane(CPU), home.transport, home.transport.copy_thread(Link())), home
        )
        ring.debug = True

        def read(tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
            cuda.issue(functools.partial(check, tuple(map(cuda.memory.unowned, tensors)), bank))

        for first in order:
            run_banks(ring, first, [BANKS[(first + step) % len(BANKS)] for step in range(4)], slots, read)
        cuda.meanwhile = None
        cuda.finish()
        statistics = ring.statistics
        del ring
    return len(wrong), statistics.staged_bytes, statistics.unstaged_bytes


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), slots=st.integers(1, 3), order=st.lists(st.integers(0, 4), max_size=4))
def test_every_bank_is_read_correctly(seed: int, slots: int, order: list[int]) -> None:
    wrong, staged, unstaged = _run(seed, slots, order)
    assert wrong == 0
    assert staged + unstaged >= len(order) * 4 * BANK_BYTES


def test_banks_come_from_staging_buffers_and_from_host_memory() -> None:
    results = [_run(seed, 2, [0, 0, 0]) for seed in range(6)]
    assert any(staged for _, staged, _ in results)
    assert any(unstaged for _, _, unstaged in results)


class _Shared(Segments):
    """Memory that all ranks can read at once, like that of GPUs."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        super().allocate(nbytes)
        self.late = self.own.map(0, nbytes)
        return self.late

    def exchange(self) -> tuple[list[torch.Tensor], object]:
        addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, self.own.address())
        opened = [open_segment(address) for address in addresses]
        dist.barrier()
        memories = [segment.map(0, segment.nbytes) for segment in opened]
        return [self.late if rank == dist.get_rank() else memory for rank, memory in enumerate(memories)], opened


class _OnCpu(DeviceHybridPacker):
    """A packer whose buffers threads fill and read, without pinned memory."""

    def _buffers(self, rank: int, segment: SharedSegment, board: StagingBoard) -> StagingBuffers:
        with mock.patch.object(torch.cuda, "Stream"):
            return StagingBuffers(board, super()._buffers(rank, segment, board).memories, keeps=self._keeps)


def _model_stays_exact() -> int:
    pinned: list[bool] = []

    def packer(options: Any, device: torch.device) -> _OnCpu:
        return _OnCpu(PeerGroup.of(None, timeout_s=50), StagedPull(Link()), 2, _Shared, device)

    def pin(owner: object, shard: torch.Tensor, device: torch.device, *, is_own: bool) -> None:
        pinned.append(is_own)

    torch.manual_seed(0)
    model = Stack("dense_bmm", depth=3, bias=True)
    with torch.no_grad():
        expected = model(tokens())
        with mock.patch.object(offload, "make_packer", packer), mock.patch.object(hybrid_home, "pin_shard", pin):
            report = moepass.offload_experts(model, home="hybrid")
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
        for _ in range(6):
            assert torch.equal(compiled(tokens()), expected)
    assert sum(pinned) == 3
    return report.staging_bytes


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_stays_exact_with_buffers_in_memory_of_all_ranks(ranks: int) -> None:
    """Four experts on three ranks give shards of different sizes, and buffers of one size."""
    assert len(set(run_ranks(ranks, _model_stays_exact))) == (2 if ranks == 3 else 1)


def _chooses() -> str:
    packer = make_packer(moepass.Hybrid(timeout_s=50), torch.device("cuda", 0))
    with pytest.raises(OptionError, match="works on device cpu only"):
        make_packer(moepass.Hybrid(timeout_s=50, host_link="emulate:1e9"), torch.device("cuda", 0))
    return f"{type(packer).__name__} {type(packer.home.transport).__name__} {packer.home.needs_host}"


def test_staging_buffers_lie_on_the_gpu_where_a_gpu_computes() -> None:
    assert run_ranks(1, _chooses) == ["DeviceHybridPacker StagedPull True"]


def _always(*arguments: object) -> bool:
    return True


def _check_at_once(action: StageAction, *arguments: Any) -> None:
    with mock.patch.object(torch.cuda.Event, "synchronize"):
        _check(action, *arguments)


def _show_before_it_is_there(
    staging: DeviceStagingBuffers, buffer: int, shard: Any, offset_bytes: int, nbytes: int
) -> None:
    with torch.cuda.stream(staging._stream):
        target = staging.memories[buffer].narrow(0, offset_bytes, nbytes)
        target.copy_(shard.memory.narrow(0, offset_bytes, nbytes), non_blocking=True)
        recorded_event(torch.cuda.current_stream())


_check = StageAction._check


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (StagingBuffers, "still_holds", _always),
        (StageAction, "_check", _check_at_once),
        (DeviceStagingBuffers, "write", _show_before_it_is_there),
    ],
)
def test_the_emulation_notices_an_order_that_is_missing(owner: type, method: str, broken: Callable[..., Any]) -> None:
    with mock.patch.object(owner, method, broken):
        assert any(_run(seed, 2, [0, 1, 0, 0])[0] for seed in range(60))

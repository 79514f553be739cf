"""Memory on an emulated CUDA is not reused before all streams are done with it.

Freed memory is handed out at once, so code that frees it too early reads the bytes of its next owner.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moepass
from moepass.models.errors import InputError
from moepass.runtime.banks import banks
from moepass.runtime.banks.banks import Bank
from moepass.runtime.execute.bound_graph import SegmentCall
from moepass.runtime.transfer.copier import Copier
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.lanes import StreamLane
from moepass.runtime.transfer.ring import Ring
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.processes.executor_calls import compiled_executor, forget_rings
from tests.helpers.processes.fake_cuda import FakeCuda, Stream
from tests.helpers.processes.ring_runs import SLOT_BYTES, holds, run_banks, small_bank

CPU = torch.device("cpu")
STREAMS = 3


def _of_generation(index: int, generation: int) -> Bank:
    bank = small_bank(index)
    for tensor in bank.views(bank.shard):
        tensor.mul_(generation)
    return bank


# The expected content of the emulated device, in host memory.
EXPECTED = [[_of_generation(index, generation) for index in range(5)] for generation in range(13)]


class _User:
    """A process that runs a model, and other work, on several streams."""

    def __init__(self, cuda: FakeCuda, slots: int) -> None:
        self._cuda = cuda
        self._streams = [cuda.compute, *(cuda.stream() for _ in range(STREAMS - 1))]
        self._slots = slots
        self._slot_bytes = SLOT_BYTES
        self._ring: Ring | None = None
        self._generation = 0
        self._banks: list[Bank] = []
        self.wrong: list[str] = []

    def do(self, what: str, number: int) -> None:
        with self._cuda.on(self._streams[number % STREAMS]):
            getattr(self, f"_{what}")(number)

    def _run(self, number: int) -> None:
        """Read some banks, beginning at another bank each time."""
        if not self._banks:
            self._make_banks()
        self._make_ring(number)
        assert self._ring is not None
        read = [self._banks[(number + step) % 5] for step in range(4)]
        run_banks(self._ring, "forward", read, self._slots, self._read)

    def _make_ring(self, number: int) -> None:
        if self._ring is None:
            copier = Copier(StreamLane(CPU))
            self._use_memory(number)
            self._ring = Ring(self._slots, self._slot_bytes, CPU, copier)
            self._ring.debug = number % 2 == 0

    def _read(self, tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
        expected = EXPECTED[self._generation][bank.spec.index]
        self._cuda.issue(functools.partial(self._check, tuple(map(self._cuda.memory.unowned, tensors)), expected))

    def _check(self, tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
        if not holds(tensors, bank):
            self.wrong.append(bank.spec.name)

    def _drop_banks(self, number: int) -> None:
        """Let the next run use other experts."""
        self._banks = []

    def _make_banks(self) -> None:
        self._generation += 1
        self._banks = [
            Bank(bank.spec, self._cuda.empty(bank.shard.numel()).copy_(bank.shard))
            for bank in EXPECTED[self._generation]
        ]
        # Homes do this before the first read.
        torch.cuda.synchronize(CPU)

    def _renew(self, number: int) -> None:
        """Reserve larger slots, as for another graph."""
        self._slot_bytes += SLOT_BYTES
        if self._ring is not None:
            self._ring.reserve(self._slots, self._slot_bytes)

    def _drop(self, number: int) -> None:
        """Delete the ring, as with its model."""
        self._ring = None

    def _use_memory(self, number: int) -> None:
        """Allocate all memory that is free for this stream, write to it, and free it."""
        sizes = [self._slot_bytes, self._slot_bytes - SLOT_BYTES, EXPECTED[0][0].shard.numel()]
        for memory in [self._cuda.empty(size) for size in sizes for _ in range(6)]:
            memory.fill_(0x55)


_STEPS = st.tuples(
    st.sampled_from(["run", "run", "run", "make_ring", "renew", "drop", "use_memory", "drop_banks"]), st.integers(0, 30)
)


def _wrong_reads(seed: int, slots: int, steps: list[tuple[str, int]]) -> list[str]:
    with FakeCuda(random.Random(seed)).installed() as cuda:
        user = _User(cuda, slots)
        for what, number in steps:
            user.do(what, number)
        cuda.finish()
        user.do("drop", 0)
        return user.wrong


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), slots=st.integers(1, 3), steps=st.lists(_STEPS, max_size=10))
def test_slots_belong_to_the_ring_until_all_streams_are_done(
    seed: int, slots: int, steps: list[tuple[str, int]]
) -> None:
    assert _wrong_reads(seed, slots, steps) == []


def _ring_of_streams(slots: int, slot_bytes: int, device: torch.device, link: object, home: Home) -> Ring:
    return Ring(slots, slot_bytes, device, Copier(StreamLane(device)), home)


class _OnStreams:
    """A compiled model whose calls alternate between streams."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = Stack("batched_mm", depth=3, bias=True)
        self._inputs = [tokens(seed=seed) for seed in range(3)]
        self._expected = [model(value) for value in self._inputs]
        self._store = moepass.offload_experts(model).store
        self._executor, self._arguments = compiled_executor(model, self._inputs[0])
        (self._index,) = [index for index, value in enumerate(self._arguments) if value is self._inputs[0]]
        self._model = model

    def stays_exact(self, seed: int) -> bool:
        with FakeCuda(random.Random(seed)).installed() as cuda:
            streams = [cuda.compute, cuda.stream()]
            with mock.patch.object(banks, "make_ring", _ring_of_streams):
                self._store.current_ring = None
                ring = self._store.ring(debug=True)
            forget_rings(self._executor)
            outputs = []
            for call in range(6):
                with cuda.on(streams[call % 2]):
                    arguments = [*self._arguments]
                    arguments[self._index] = self._inputs[call % 3]
                    outputs.append(self._executor(arguments)[0])
            cuda.finish()
            assert ring.statistics.copies > 0
            del ring
            self._store.current_ring = None
        return all(torch.equal(value, self._expected[call % 3]) for call, value in enumerate(outputs))


@pytest.fixture(scope="module")
def model_on_streams() -> _OnStreams:
    with torch.no_grad():
        return _OnStreams()


@pytest.mark.slow
def test_a_model_computes_the_same_on_any_stream(no_grad: None, model_on_streams: _OnStreams) -> None:
    """This covers slots, and memory that segments and operators of the model allocate."""
    assert all(model_on_streams.stays_exact(seed) for seed in range(5))


def _call_on_another_stream(call: SegmentCall, inputs: list[Any]) -> Any:
    with torch.cuda.stream(torch.cuda.Stream(CPU)):
        return _segment_call(call, inputs)


def _wait_for_nothing(copier: Copier, filled: object, statistics: object) -> Callable[[], float]:
    return lambda: 0.0


_segment_call = SegmentCall._run


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (SegmentCall, "_run", _call_on_another_stream),
        (Copier, "wait", _wait_for_nothing),
        (Copier, "event", lambda copier: None),
    ],
)
def test_the_emulation_notices_activations_on_other_streams(
    no_grad: None, model_on_streams: _OnStreams, owner: type, method: str, broken: Callable[..., Any]
) -> None:
    with mock.patch.object(owner, method, broken):
        assert not all(model_on_streams.stays_exact(seed) for seed in range(30))


class _EagerReads:
    """Uncompiled code that reads banks on alternating streams and keeps none of them."""

    def __init__(self) -> None:
        self.store = moepass.offload_experts(Stack("dense_bmm", depth=2)).store
        self.store.warns_of_uncompiled_calls = False

    def stay_right(self, seed: int) -> bool:
        try:
            return self._stay_right(seed)
        except InputError:  # "have been written to"
            return False
        finally:
            self.store.forget_gathered()

    def _stay_right(self, seed: int) -> bool:
        right: list[bool] = []

        def check(tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
            right.append(holds(tensors, bank))

        with FakeCuda(random.Random(seed)).installed() as cuda:
            streams = [cuda.compute, cuda.stream()]
            for index, number in [(0, 0), (0, 1), (1, 1), (1, 0), (0, 1), (0, 1), (1, 0)]:
                with cuda.on(streams[number]):
                    tensors = self.store.gather_now(index)
                    cuda.issue(
                        functools.partial(check, tuple(map(cuda.memory.unowned, tensors)), self.store.banks[index])
                    )
                    del tensors
            cuda.finish()
        return len(right) == 7 and all(right)


def _current_stream(device: torch.device) -> Stream:
    return torch.cuda.current_stream(device)  # type: ignore[return-value]


def test_eager_reads_belong_to_the_stream_of_the_caller(no_grad: None) -> None:
    reads = _EagerReads()
    with mock.patch.object(banks, "_current_stream", _current_stream):
        assert all(reads.stay_right(seed) for seed in range(20))
    with mock.patch.object(banks, "_current_stream", return_value=None):
        assert not all(reads.stay_right(seed) for seed in range(60))


def _forget_that_buffers_are_used(ring: Ring, *sizes: int) -> None:
    _take_buffers(ring, *sizes)
    ring._freed = {}


def _wait_for_this_stream(lane: StreamLane) -> None:
    lane.stream.synchronize()
    torch.cuda.current_stream(CPU).synchronize()
    lane._prune()


def _wait_for_copies(copier: Copier) -> None:
    copier._lane.stream.synchronize()


def _do_not_wait(copier: Copier) -> None:
    pass


def _keep_no_sources(copier: Copier, *arguments: Any) -> object:
    copy = _submit(copier, *arguments)
    copier._lane._in_use.clear()
    return copy


def _record_no_event(copier: Copier) -> None:
    return None


_take_buffers, _submit = Ring._take_buffers, Copier.submit

_IN_TURNS = [("run", 0), ("run", 1), ("use_memory", 0), ("run", 2), ("renew", 0), ("use_memory", 0), ("run", 0)]
_AGAIN = [("run", 0), ("use_memory", 0), ("run", 1), ("drop", 2), ("use_memory", 0), ("run", 0), ("use_memory", 0)]


_ON_ANOTHER_STREAM = [("run", 0), ("drop", 0), ("make_ring", 0), ("run", 1)]

# With one slot, a ring remembers the first bank of a run and the last.
_OTHER_BANKS = [("run", 1), ("run", 0), ("drop_banks", 1), ("use_memory", 1), ("run", 1)]


@pytest.mark.parametrize(
    ("owner", "method", "broken", "slots", "steps"),
    [
        (Ring, "_take_buffers", _forget_that_buffers_are_used, 2, _ON_ANOTHER_STREAM),
        (StreamLane, "synchronize", _wait_for_this_stream, 2, _IN_TURNS),
        (Copier, "close", _wait_for_copies, 2, _AGAIN),
        (Copier, "close", _do_not_wait, 2, _AGAIN),
        (Copier, "submit", _keep_no_sources, 1, _OTHER_BANKS),
        (Copier, "event", _record_no_event, 2, _IN_TURNS),
    ],
)
def test_the_emulation_notices_memory_that_is_freed_too_early(
    owner: type, method: str, broken: Callable[..., Any], slots: int, steps: list[tuple[str, int]]
) -> None:
    with mock.patch.object(owner, method, broken):
        assert any(_wrong_reads(seed, slots, steps) for seed in range(120))

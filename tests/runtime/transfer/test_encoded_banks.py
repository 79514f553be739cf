"""Banks of home `host` that are decoded on the way: their sizes at rest, on the link and in the slot differ."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import queue
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moepass
from moepass.models.errors import InputError
from moepass.passes.ir.bank_format import ENCODED_BUFFERS
from moepass.passes.ir.plan import BankSpec, GatherSignature
from moepass.passes.ir.timeline import COPY, DECODE
from moepass.runtime.banks.banks import Bank, BankStore, pack_bank
from moepass.runtime.homes.options import packers
from moepass.runtime.kernels.decoders import decode_bank
from moepass.runtime.transfer import ring as ring_module
from moepass.runtime.transfer.copier import Copier
from moepass.runtime.transfer.copying import CopyError, DecodeAction, SlotCopy
from moepass.runtime.transfer.lanes import HOST_LANE, StreamLane
from moepass.runtime.transfer.ring import EncodedCopy, Ring
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.processes import halved_format
from tests.helpers.processes.fake_cuda import FakeCuda
from tests.helpers.processes.late_thread import LateTransport
from tests.helpers.processes.ring_runs import holds

CPU = torch.device("cpu")
ROWS = tokens()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _offloaded(depth: int = 3, plain: tuple[int, ...] = (), **options: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a model with encoded banks, except those with indices in `plain`, and its output before the offload."""
    torch.manual_seed(0)
    model = Stack("dense_bmm", depth=depth, bias=True)
    halved_format.halve(model)
    expected = model(ROWS)

    def pack(index: int, *arguments: Any, **keywords: Any) -> Bank:
        with contextlib.nullcontext() if index in plain else halved_format.resting_halved():
            return pack_bank(index, *arguments, **keywords)

    with mock.patch.object(packers, "pack_bank", pack):
        moepass.offload_experts(model, **options)
    return model, expected


def _store(model: torch.nn.Module) -> BankStore:
    store = next(module.store for module in model.modules() if hasattr(module, "store"))
    assert isinstance(store, BankStore)
    return store


def test_sizes_at_rest_on_the_link_and_in_the_slot_differ() -> None:
    model, _ = _offloaded()
    for bank in _store(model).banks:
        sizes = bank.spec.format
        assert sizes.decoder == halved_format.NAME
        assert sizes.link_bytes == sizes.home_bytes < sizes.slot_bytes
        assert bank.shard.numel() == sizes.home_bytes
    largest = _store(model).banks[0].spec.format
    assert _store(model).ring_bytes == 2 * largest.slot_bytes + 2 * largest.link_bytes


def test_uncompiled_code_reads_decoded_banks() -> None:
    model, expected = _offloaded()
    for _ in range(2):
        assert torch.equal(model(ROWS), expected)


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("plain", [(), (1,), (0, 2)], ids=["all encoded", "one plain", "two plain"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_compiled_code_streams_and_decodes(slots: int, plain: tuple[int, ...]) -> None:
    model, expected = _offloaded(depth=4, plain=plain, slots=slots)
    with moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
        for _ in range(3):
            assert torch.equal(compiled(ROWS), expected)
    (compilation,) = compilations
    plan, ring = compilation.plan, compilation.executor.ring
    assert ring is not None
    formats = [plan.bank(stay.bank).format for stay in plan.slot_stays]
    encoded = [bank_format for bank_format in formats if bank_format.is_encoded]
    assert sum(step.op == "decode" for step in plan.steps) == len(encoded) == 4 - len(plain)
    assert plan.device_bank_bytes == ring.device_bytes
    statistics = ring.statistics
    # Decodes for the next run count, too.
    assert statistics.decodes >= 3 * len(encoded)
    assert statistics.copied_bytes < statistics.copies * plan.slot_bytes or len(plain) == 4
    assert statistics.ahead_used > 0


@pytest.mark.slow
def test_inductor_streams_and_decodes() -> None:
    model, expected = _offloaded()
    compiled = torch.compile(model, backend="asyncep")
    for _ in range(3):
        torch.testing.assert_close(compiled(ROWS), expected)


@pytest.mark.slow
def test_a_weight_outside_a_block_is_decoded_too() -> None:
    model, _ = _offloaded()
    blocks: Any = model.get_submodule("blocks")

    def call(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x) * blocks[1].up.sum()
        return result

    expected = call(ROWS)
    compiled = torch.compile(call, backend="asyncep", options={"lower": "eager", "debug": True})
    for _ in range(2):
        assert torch.equal(compiled(ROWS), expected)


def test_other_backends_and_state_dicts_refuse_encoded_banks() -> None:
    model, _ = _offloaded()
    with pytest.raises(InputError, match=r"rest encoded \(halved\)"):
        model.state_dict()
    recompiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(moepass.MoepassError, match="rests encoded, and decoder 'halved' is not in this graph"):
        recompiled(ROWS)


def test_a_decoder_error_names_the_bank_and_the_ring_stays_usable() -> None:
    model, expected = _offloaded()
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    assert torch.equal(compiled(ROWS), expected)
    calls = 0

    def fail(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError("bad bytes")
        decode_bank(*arguments)

    with _decoding_by(fail), pytest.raises(CopyError, match=r"bank blocks\.\d.* could not be copied .*bad bytes"):
        _run_often(compiled)
    assert torch.equal(compiled(ROWS), expected)


def _run_often(compiled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for _ in range(3):
        compiled(ROWS)


def _decoding_by(decode: Callable[..., None]) -> Any:
    return mock.patch.object(ring_module, "decode_bank", decode)


def test_a_bank_without_its_parts_is_an_error() -> None:
    """The plan of a graph does not know how banks are decoded, and a slot must not keep the bytes of another bank."""
    spec = dataclasses.replace(BANKS[0].spec, parts=())
    with pytest.raises(InputError, match=r"layers\.0 rests as 'halved', and its plan does not say how to decode it"):
        decode_bank(spec, BANKS[0].shard, torch.empty(spec.format.slot_bytes, dtype=torch.uint8))


# ---- Copies and decodes on lanes of their own ------------------------------------------------------------------------


def _small_bank(index: int) -> Bank:
    """Return a bank whose numbers identify it; banks have different sizes."""
    tensors = {"up": torch.full((2, 20 + 30 * index), index + 1.0), "down": torch.full((2, 3), -index - 1.0)}
    return pack_bank(index, f"layers.{index}", tensors, home="host")


PLAIN = [_small_bank(index) for index in range(5)]
with halved_format.resting_halved():
    ENCODED = [_small_bank(index) for index in range(5)]
# Every other bank rests encoded.
BANKS = [(PLAIN if index % 2 else ENCODED)[index] for index in range(5)]
SIZES = max(bank.spec.format.slot_bytes for bank in BANKS), max(bank.spec.format.link_bytes for bank in BANKS)


def _run(ring: Ring, graph: int, numbers: list[int], slots: int, read: Callable[..., object]) -> None:
    slots = min(slots, len(numbers))
    banks = [BANKS[number] for number in numbers]

    copied: list[object] = []
    filled: list[object] = []

    def copy_ahead() -> None:
        """Copy encoded banks that come next, while an encoded buffer is free."""
        while len(copied) < len(banks) and banks[len(copied)].spec.format.is_encoded:
            if sum(bank.spec.format.is_encoded for bank in banks[len(filled) : len(copied)]) == ENCODED_BUFFERS:
                break
            copy(None)

    def copy(after: object) -> None:
        number = len(copied)
        copied.append(ring.prefetch([banks[number].shard], banks[number].spec, number % slots, after))

    def fill(after: object) -> None:
        number = len(filled)
        spec, slot = banks[number].spec, number % slots
        if number == len(copied):
            copy(None if spec.format.is_encoded else after)
        filled.append(ring.decode(copied[number], spec, slot, after) if spec.format.is_encoded else copied[number])
        if number + 1 >= slots:
            copy_ahead()

    with ring.run(graph, GatherSignature(slots=slots)):
        for _ in range(slots):
            fill(None)
        for number, bank in enumerate(banks):
            slot, refill = number % slots, number + slots
            read(ring.acquire(filled[number], bank.spec, slot), PLAIN[numbers[number]])
            done = ring.release(slot, last=refill >= len(banks))
            if refill < len(banks):
                fill(done)


# Who does the work: streams of an emulated CUDA, to which the caller or two threads issue it, or two threads of a CPU.
# Streams and threads are delayed at random.
LANES = ("streams", "issued", "threads")


def _wrong_reads(seed: int, slots: int, runs: list[list[int]], order: list[int], lanes: str) -> list[str]:
    """Return the banks that were read wrong."""
    wrong: list[str] = []

    def check(tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
        if not holds(tensors, bank):
            wrong.append(bank.spec.name)

    transport = LateTransport(random.Random(seed))
    thread = None if lanes == "streams" else transport.copy_thread(ring_module.Link())
    if lanes == "threads":
        _run_all(Copier(HOST_LANE, transport, thread), slots, runs, order, check)
        return wrong
    with FakeCuda(random.Random(seed)).installed() as cuda:

        def decode(*arguments: Any) -> None:
            cuda.issue(functools.partial(decode_bank, *arguments))

        def read(*arguments: Any) -> None:
            cuda.issue(functools.partial(check, *arguments))

        with _decoding_by(decode):
            _run_all(Copier(StreamLane(CPU), transport, thread), slots, runs, order, read)
            cuda.finish()
    return wrong


def _run_all(copier: Copier, slots: int, runs: list[list[int]], order: list[int], read: Callable[..., object]) -> None:
    ring = Ring(slots, SIZES[0], CPU, copier)
    ring.debug = True
    ring.reserve(slots, *SIZES)
    for number in order:
        run = number % len(runs)
        _run(ring, run, runs[run], slots, read)


RUNS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    slots=st.integers(1, 4),
    runs=RUNS,
    order=st.lists(st.integers(0, 2), max_size=8),
    lanes=st.sampled_from(LANES),
)
def test_every_bank_is_decoded_correctly(
    seed: int, slots: int, runs: list[list[int]], order: list[int], lanes: str
) -> None:
    assert _wrong_reads(seed, slots, runs, order, lanes) == []


def _decode_on_the_compute_stream(
    copier: Copier, copied: Any, decoder: Any, encoded: torch.Tensor, slot: torch.Tensor, after: object
) -> object:
    decoder(encoded, slot)
    return copied


def _forget_the_decode(copier: Copier, copied: Any, *arguments: Any) -> object:
    decode = _decode(copier, copied, *arguments)
    decode.performed = copied.performed
    return decode


def _decode_into_a_slot_in_use(copier: Copier, copied: Any, *arguments: Any) -> object:
    return _decode(copier, copied, *arguments[:-1], None)


def _wait_for_the_slot_alone(copy: SlotCopy) -> Iterator[object]:
    yield copy.after


def _copy_during_the_last_decode(copier: Copier, *arguments: Any) -> object:
    return _submit(copier, *arguments[:-1])


def _forget_what_was_dropped(ring: Ring, buffer: int) -> None:
    _drop_ahead(ring, buffer)
    ring._dropped.clear()


def _decode_nothing(decode: DecodeAction, *arguments: object) -> None:
    pass


_decode, _submit, _drop_ahead = Copier.decode, Copier.submit, Ring._drop_ahead


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("owner", "method", "broken", "lanes"),
    [
        (Copier, "decode", _decode_on_the_compute_stream, ("streams",)),
        (Copier, "decode", _forget_the_decode, ("streams",)),
        (Copier, "decode", _decode_into_a_slot_in_use, ("streams", "issued")),
        (SlotCopy, "_awaited", _wait_for_the_slot_alone, ("streams", "issued")),
        (Copier, "submit", _copy_during_the_last_decode, LANES),
        (Ring, "_drop_ahead", _forget_what_was_dropped, ("streams", "issued")),
        (DecodeAction, "fill", _decode_nothing, LANES),
    ],
)
def test_the_emulation_notices_an_order_that_is_missing(
    owner: type, method: str, broken: Callable[..., Any], lanes: tuple[str, ...]
) -> None:
    runs, order = [[0, 2, 4, 1], [3, 2, 0], [1, 3, 1]], [0, 0, 1, 0, 1, 2, 1, 0, 2, 0, 1]
    with mock.patch.object(owner, method, broken):
        for kind in lanes:
            assert any(_wrong_reads(seed, slots, runs, order, kind) for seed in range(120) for slots in (1, 2)), kind


def _ring() -> Ring:
    ring = ring_module.make_ring(1, SIZES[0], CPU, ring_module.Link())
    ring.reserve(1, *SIZES)
    return ring


def test_a_bank_is_copied_while_the_bank_before_it_is_decoded() -> None:
    """The decode of the first bank ends only after the copy of the second."""
    ring, (first, second) = _ring(), ENCODED[:2]
    copies: queue.SimpleQueue[EncodedCopy] = queue.SimpleQueue()

    def decode(bank: BankSpec, *memory: torch.Tensor) -> None:
        if bank == first.spec:
            following = copies.get(timeout=60).copied
            assert following is not None
            assert following.finished.wait(60), "the copy waits for the decode"
        decode_bank(bank, *memory)

    with _decoding_by(decode), ring.run("run", GatherSignature(slots=1)):
        filled = ring.decode(ring.prefetch([first.shard], first.spec, 0, None), first.spec, 0, None)
        copied = ring.prefetch([second.shard], second.spec, 0, None)
        assert isinstance(copied, EncodedCopy)
        copies.put(copied)
        assert holds(ring.acquire(filled, first.spec, 0), PLAIN[0])
        filled = ring.decode(copied, second.spec, 0, ring.release(0))
        assert holds(ring.acquire(filled, second.spec, 0), PLAIN[1])
        ring.release(0, last=True)


def test_a_third_copy_needs_a_decode_first() -> None:
    ring = _ring()
    with pytest.raises(InputError, match=r"layers\.2 cannot be copied: the 2 encoded buffers hold banks"):
        _run_three_copies(ring)
    # The failed run has freed the buffers.
    _run(ring, 0, [0, 2, 4], 1, lambda tensors, bank: holds(tensors, bank))


def _run_three_copies(ring: Ring) -> None:
    with ring.run("run", GatherSignature(slots=1)):
        for bank in ENCODED[:3]:
            ring.prefetch([bank.shard], bank.spec, 0, None)


class _NeverEarly(random.Random):
    def choice(self, values: Any) -> Any:
        return 0  # copies that a `LateThread` performs at submission


def test_no_dropped_decode_is_forgotten_before_it_ends() -> None:
    """It would write into its slot during the next copy into it."""
    transport = LateTransport(_NeverEarly())
    ring = Ring(1, SIZES[0], CPU, Copier(HOST_LANE, transport, transport.copy_thread(ring_module.Link())))
    ring.reserve(1, *SIZES)
    for _ in range(2):
        _run(ring, 0, [0], 1, lambda *read: None)
    ahead = ring._ahead[0].filled
    assert not ahead.finished.is_set()
    with ring.run(1, GatherSignature(slots=1)):
        ring.forget()
        assert ahead.abandoned.is_set()
        assert ahead.finished.is_set()


def test_a_copy_error_of_an_encoded_bank_is_raised_by_the_acquire() -> None:
    ring, bank = _ring(), ENCODED[0]
    with pytest.raises(CopyError, match=r"layers\.0 could not be copied .*a source of 4 bytes is read up to byte"):
        _run_shard(ring, bank, bank.shard[:4])
    _run_shard(ring, bank, bank.shard)


def _run_shard(ring: Ring, bank: Bank, shard: torch.Tensor) -> None:
    with ring.run("run", GatherSignature(slots=1)):
        filled = ring.decode(ring.prefetch([shard], bank.spec, 0, None), bank.spec, 0, None)
        assert holds(ring.acquire(filled, bank.spec, 0), PLAIN[bank.spec.index])
        ring.release(0, last=True)


def test_a_timeline_shows_the_copy_and_the_decode_of_a_bank() -> None:
    ring = _ring()
    _run(ring, 0, [0, 2, 4], 1, lambda *read: None)
    with moepass.record_timeline() as recording:
        _run(ring, 0, [0, 2, 4], 1, lambda *read: None)
    timeline = recording.timeline
    # The first bank was filled before the recording, and again for the next run.
    names = [ENCODED[number].spec.name for number in (0, 2, 4, 0)]
    copies, decodes = timeline.on(COPY), timeline.on(DECODE)
    assert [event.layer for event in copies] == [event.layer for event in decodes] == names
    for copied, decoded in zip(copies, decodes, strict=True):
        assert (copied.op, decoded.op) == ("copy", "decode")
        assert copied.end_seconds <= decoded.start_seconds
    for earlier, later in [*itertools.pairwise(copies), *itertools.pairwise(decodes)]:
        assert earlier.end_seconds <= later.start_seconds


def test_a_copy_is_decoded_once() -> None:
    ring = _ring()
    bank = BANKS[0]
    with ring.run("run", GatherSignature(slots=1)):
        copied = ring.prefetch([bank.shard], bank.spec, 0, None)
        filled = ring.decode(copied, bank.spec, 0, None)
        with pytest.raises(InputError, match=r"layers\.0 was decoded already"):
            ring.decode(copied, bank.spec, 0, None)
        assert holds(ring.acquire(filled, bank.spec, 0), PLAIN[0])
        ring.release(0, last=True)

"""The ring by itself: bytes, order, poison, the emulated link, errors."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from moepass.models.errors import InputError, OptionError
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BankSpec, TensorSpec
from moepass.passes.ir.shards import ALIGNMENT_BYTES
from moepass.runtime.banks.banks import Bank, pack_bank
from moepass.runtime.transfer.copying import CopyError, CopyThread, SlotCopy
from moepass.runtime.transfer.lanes import SLICE_BYTES
from moepass.runtime.transfer.link import Link, parse_link
from moepass.runtime.transfer.ring import Ring, make_ring
from moepass.runtime.transfer.sources import whole
from tests.helpers.graphs.error_fields import refused
from tests.helpers.processes.emulated_clock import EmulatedClock

CPU = torch.device("cpu")


def _bank(index: int = 0, count: int = 1000, value: float = 1.0) -> Bank:
    tensors = {"up": torch.full((2, count), value), "down": torch.full((2, 3), -value, dtype=torch.bfloat16)}
    return pack_bank(index, f"layers.{index}", tensors, home="host")


def _ring(slots: int = 2, link: Link = Link(), debug: bool = False, slot_bytes: int = 1 << 14) -> Ring:  # noqa: B008
    ring = make_ring(slots, slot_bytes, CPU, link)
    ring.debug = debug
    return ring


def test_a_packed_bank_returns_its_tensors() -> None:
    tensors = {
        "a": torch.randn(3, 5, 7),
        "b": torch.randn(3, 2, dtype=torch.float64),
        "c": torch.randn(3, 4, 4).to(torch.bfloat16).transpose(1, 2),
    }
    bank = pack_bank(4, "layers.4", tensors, home="host")
    assert bank.shard.dtype == torch.uint8
    assert bank.shard.numel() == bank.spec.format.slot_bytes
    for view, spec, (name, tensor) in zip(bank.views(bank.shard), bank.spec.tensors, tensors.items(), strict=True):
        assert (spec.name, spec.shape, spec.torch_dtype) == (name, tuple(tensor.shape), tensor.dtype)
        assert spec.offset_bytes % ALIGNMENT_BYTES == 0
        assert torch.equal(view, tensor)
        assert view.is_contiguous()


def test_prefetch_and_acquire_return_the_bank() -> None:
    ring, bank = _ring(), _bank()
    filled = ring.prefetch([bank.shard], bank.spec, 1, None)
    up, down = ring.acquire(filled, bank.spec, 1)
    assert torch.equal(up, torch.ones(2, 1000))
    assert torch.equal(down, -torch.ones(2, 3, dtype=torch.bfloat16))
    assert (ring.statistics.copies, ring.statistics.copied_bytes) == (1, bank.spec.format.slot_bytes)


def test_copies_allocate_nothing_besides_the_ring() -> None:
    ring = _ring(slots=3, slot_bytes=12345)
    assert ring.slots == 3
    assert ring.device_bytes == 3 * 12345


def test_copies_run_in_the_order_of_their_prefetches() -> None:
    ring = _ring(slots=1, link=Link(1e6))
    banks = [_bank(index, value=index + 1.0) for index in range(3)]
    fillings = [ring.prefetch([bank.shard], bank.spec, 0, None) for bank in banks]
    # Later copies into the same slot: the schedule's fault, but the last one wins.
    (up, _) = ring.acquire(fillings[2], banks[2].spec, 0)
    assert all(filling.finished.is_set() for filling in fillings)
    assert float(up[0, 0]) == 3.0


def test_poison_is_nan_in_every_float_type_of_a_bank() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
    ring = _ring(debug=True)
    for dtype in dtypes:
        bank = pack_bank(0, "layer", {"up": torch.ones(2, 3, 4).to(dtype)}, home="host")
        (up,) = ring.acquire(ring.prefetch([bank.shard], bank.spec, 0, None), bank.spec, 0)
        assert torch.equal(up.float(), torch.ones(2, 3, 4))
        ring.release(0)
        assert bool(up.float().isnan().all()), dtype


def test_without_debug_nothing_is_poisoned() -> None:
    ring, bank = _ring(), _bank()
    (up, _) = ring.acquire(ring.prefetch([bank.shard], bank.spec, 0, None), bank.spec, 0)
    ring.release(0)
    assert float(up.sum()) == 2000


def test_the_error_for_a_slot_that_is_too_small_names_the_layer() -> None:
    ring, bank = _ring(slot_bytes=100), _bank(7)
    filled = ring.prefetch([bank.shard], bank.spec, 0, None)
    with pytest.raises(
        CopyError, match=rf"bank layers\.7 .*{bank.spec.format.slot_bytes} contiguous bytes do not fit a slot of 100"
    ):
        ring.acquire(filled, bank.spec, 0)


def test_reset_abandons_copies_and_keeps_the_thread() -> None:
    ring = _ring(link=Link(1.0))  # a transfer would take hours
    bank = _bank()
    pending = [ring.prefetch([bank.shard], bank.spec, slot, None) for slot in (0, 1)]
    ring.reset()
    assert all(copy.finished.is_set() for copy in pending)
    fast = _bank(1, value=5.0)
    copy = SlotCopy([whole(fast.shard)], torch.empty_like(fast.shard), "x")
    copy.abandoned.set()
    assert ring._copier._thread is not None
    ring._copier._thread.submit(copy).wait()  # the thread is still the same one


@pytest.mark.parametrize("nbytes", [1, SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES])
def test_copies_of_every_size_are_complete(nbytes: int) -> None:
    thread = CopyThread(Link())
    source = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    slot = torch.zeros(nbytes + 5, dtype=torch.uint8)
    thread.submit(SlotCopy([whole(source)], slot, "layer")).wait()
    assert torch.equal(slot[:nbytes], source)
    assert int(slot[nbytes:].sum()) == 0


def test_the_copy_thread_ends_with_its_owner() -> None:
    earlier = set(threading.enumerate())
    thread = CopyThread(Link())
    (worker,) = set(threading.enumerate()) - earlier
    gone = weakref.ref(thread)
    assert worker.is_alive()
    del thread
    gc.collect()
    worker.join(timeout=5)
    assert gone() is None
    assert not worker.is_alive()


def test_an_emulated_link_takes_bytes_over_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = EmulatedClock(monkeypatch, waits_for_reader=True)
    bank = _bank(count=50_000)
    ring = _ring(link=Link(bank.spec.format.slot_bytes / 0.2), slot_bytes=bank.spec.format.slot_bytes)
    ring.acquire(ring.prefetch([bank.shard], bank.spec, 0, None), bank.spec, 0)
    assert clock.seconds == pytest.approx(0.2)
    assert ring.statistics.waited_seconds == pytest.approx(0.2)


def test_an_emulated_transfer_overlaps_computation_before_the_acquire(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = EmulatedClock(monkeypatch)
    bank = _bank(count=50_000)
    ring = _ring(link=Link(bank.spec.format.slot_bytes / 0.3), slot_bytes=bank.spec.format.slot_bytes)
    filled = ring.prefetch([bank.shard], bank.spec, 0, None)
    filled.finished.wait()
    assert clock.seconds == pytest.approx(0.3)
    ring.acquire(filled, bank.spec, 0)
    assert ring.statistics.waited_seconds == 0


def test_emulated_transfers_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = EmulatedClock(monkeypatch)
    bank = _bank(count=10_000)
    ring = _ring(link=Link(bank.spec.format.slot_bytes / 0.1), slot_bytes=bank.spec.format.slot_bytes)
    fillings = [ring.prefetch([bank.shard], bank.spec, slot, None) for slot in (0, 1)]
    for slot, filled in enumerate(fillings):
        ring.acquire(filled, bank.spec, slot)
    assert clock.seconds == pytest.approx(0.2)


@pytest.mark.parametrize(("text", "rate"), [("real", None), ("emulate:5e9", 5e9), ("emulate:1000", 1000.0)])
def test_parse_link(text: str, rate: float | None) -> None:
    link = parse_link(text)
    assert link.bytes_per_s == rate
    assert link.is_emulated == (rate is not None)
    assert link.seconds(2000) == (2000 / rate if rate else 0.0)
    assert ("emulated" in str(link)) == (rate is not None)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "emulate", "emulate:", "emulate:x", "emulate:0", "emulate:-1", "emulate:nan", "emulate:inf", "real:3"],
)
def test_errors_for_invalid_links_name_them(text: str) -> None:
    with refused(OptionError, name="a_link", value=text):
        parse_link(text, "a_link")


def test_a_device_without_a_ring_is_an_error() -> None:
    with refused(InputError, name="device", value="meta"):
        make_ring(2, 100, torch.device("meta"), Link())


def test_slots_made_in_inference_mode_are_writable_outside_it() -> None:
    with torch.inference_mode():
        ring = _ring(debug=True)
    bank = _bank()
    ring.acquire(ring.prefetch([bank.shard], bank.spec, 0, None), bank.spec, 0)
    ring.release(0)  # fills the slot in place, which an inference tensor would not take here
    assert not any(slot.is_inference() for slot in ring._buffers)


def test_views_of_two_banks_in_one_slot_do_not_mix() -> None:
    ring = _ring(slots=1)
    first = _bank(0, value=1.0)
    spec = TensorSpec("up", (4, 10), "float64", 0)
    second = Bank(
        BankSpec(1, "layers.1", "host", BankFormat.plain(320), (spec,)),
        torch.full((40,), 2.0, dtype=torch.float64).view(torch.uint8),
    )
    for _ in range(2):
        (up, _) = ring.acquire(ring.prefetch([first.shard], first.spec, 0, None), first.spec, 0)
        assert float(up.sum()) == 2000
        (matrix,) = ring.acquire(ring.prefetch([second.shard], second.spec, 0, None), second.spec, 0)
        assert matrix.shape == (4, 10)
        assert float(matrix.sum()) == 80


def test_many_threads_wait_for_their_own_copies() -> None:
    thread = CopyThread(Link())
    results: dict[int, bool] = {}

    def work(value: int) -> None:
        source = torch.full((100_000,), value, dtype=torch.uint8)
        for _ in range(20):
            slot = torch.empty_like(source)
            thread.submit(SlotCopy([whole(source)], slot, str(value))).wait()
            results[value] = results.get(value, True) and torch.equal(slot, source)

    workers = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == dict.fromkeys(range(4), True)


def test_a_ring_grows_between_runs_and_never_shrinks() -> None:
    ring, bank, large = _ring(slots=1), _bank(), _bank(1, count=100_000, value=3.0)
    ring.acquire(ring.prefetch([bank.shard], bank.spec, 0, None), bank.spec, 0)
    ring.reserve(2, large.spec.format.slot_bytes)
    assert (ring.slots, ring.device_bytes) == (2, 2 * large.spec.format.slot_bytes)
    for number, slot in ((bank, 0), (large, 1)):
        (up, _) = ring.acquire(ring.prefetch([number.shard], number.spec, slot, None), number.spec, slot)
        assert torch.equal(up, number.views(number.shard)[0])
    ring.reserve(1, 100)
    assert (ring.slots, ring.device_bytes) == (2, 2 * large.spec.format.slot_bytes)

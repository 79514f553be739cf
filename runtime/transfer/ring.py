"""The ring: a fixed set of slots on the compute device, and the operations of a schedule on them.

`passes/ir/slot_operations.py` defines `prefetch`, `decode`, `acquire` and `release`. A ring serves one run at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from moepass.models.errors import InputError
from moepass.passes.ir.bank_format import ENCODED_BUFFERS
from moepass.passes.ir.plan import BankSpec, GatherSignature
from moepass.passes.ir.shards import expert_range, pieces_in_slot, shard_layout
from moepass.runtime.kernels.decoders import decode_bank
from moepass.runtime.kernels.slot_tensors import slot_tensors
from moepass.runtime.system.huge_pages import empty_in_huge_pages
from moepass.runtime.system.non_reentrant_lock import NonReentrantLock
from moepass.runtime.transfer.copier import Copier, RingStatistics, Wait
from moepass.runtime.transfer.copying import SlotCopy
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.lanes import HOST_LANE, StreamLane
from moepass.runtime.transfer.learned_order import Fetch, LearnedOrder
from moepass.runtime.transfer.link import Link, check_link_to
from moepass.runtime.transfer.sources import MemorySource, Source

# All bits set is a NaN in every floating type that experts come in: fp32, bf16, fp16, fp8 e4m3fn and e5m2.
POISON_BYTE = 0xFF

_THIS_PROCESS = Home()
# A tensor of a bank [experts, ...]. In parts: the experts of lower ranks, of this rank, and of higher ranks. In FP8:
# `BlockScaledWeights`.
BankTensor = torch.Tensor | tuple[torch.Tensor, ...]
_REENTERED = (
    "another run of this model is under way in this thread: a custom operator, a hook or a signal handler called the "
    "model while it ran, and its experts stream through one ring, which serves one run at a time; call the model after "
    "that run, or a second model with its own offload_experts call"
)


@dataclasses.dataclass
class EncodedBuffer:
    """Memory that encoded banks are copied into and decoded from, one at a time.

    The next copy into it waits for the moment `after`, and for the last decode from it, `decoded`.
    """

    memory: torch.Tensor
    after: object = None
    decoded: SlotCopy | None = None


@dataclasses.dataclass
class EncodedCopy:
    """The copy of an encoded bank into `buffer`. `copied` becomes None when its decode is issued."""

    copied: SlotCopy | None
    buffer: EncodedBuffer


@dataclasses.dataclass
class Ahead:
    """A slot that is filled before a run has asked for its bank.

    `fetch` keeps the bank's memory alive, so that no other bank can have the same address and `contents`.
    """

    fetch: Fetch
    contents: Hashable
    filled: SlotCopy


class Ring:
    """`slots` buffers of `slot_bytes` each on `device`, filled by `copier` from the banks of `home`.

    A schedule numbers its slots 0, 1, ... in the order in which it first fills them. The ring maps slots to buffers in
    each run: slot 0 is the buffer that has been free for longest. So the first buffer that becomes free at the end of a
    run is the one that the next run needs first, and the ring fills it right then, with the bank that followed the last
    time. A wrong guess costs a copy, never a result: the run starts its own copy instead.

    With `debug`, released slots are filled with NaN.
    """

    # The current run: its graph, its number of slots, their buffers, and its first fetch into each slot.
    _graph: Hashable
    _used: int
    _buffer_of: list[int]
    _beginning: dict[int, Fetch]
    _has_begun: bool
    # Buffers that no run uses, the one that has been free for longest first, and the moments at which they became free.
    _free: list[int]
    _freed: dict[int, object]
    # Encoded buffers whose decode was issued, the one that has been free for longest first.
    _free_encoded: deque[EncodedBuffer]

    def __init__(
        self, slots: int, slot_bytes: int, device: torch.device, copier: Copier, home: Home = _THIS_PROCESS
    ) -> None:
        self.device, self.home = device, home
        self.debug = False
        # Called before each run; it raises if the run must not begin.
        self.before_run: Callable[[], Callable[[], None] | None] = lambda: None
        self._lock = NonReentrantLock(_REENTERED)
        self._is_quiet = True
        self._statistics = RingStatistics()
        self._copier = copier
        self._views: dict[tuple[int, BankSpec], tuple[BankTensor, ...]] = {}
        # For banks in parts: the sources of the home, and the same sources with the pieces that go into a slot.
        self._sources: dict[BankSpec, tuple[Sequence[Source], tuple[Source, ...]]] = {}
        # The last fetch of a bank in parts in the current run, by slot.
        self._fetches: dict[int, Fetch] = {}
        self._order: LearnedOrder[Hashable, dict[int, Fetch]] = LearnedOrder()
        self._ahead: dict[int, Ahead] = {}
        # The last dropped copy or decode into a buffer, which the next copy into it follows.
        self._dropped: dict[int, SlotCopy] = {}
        # The waits of the present run, or of the last one.
        self.waits: list[Wait] = []
        self._take_buffers(slots, slot_bytes, 0)

    def __del__(self) -> None:
        # The next owner of the buffers' memory does not wait for work that still uses it.
        if hasattr(self, "_copier"):
            self._copier.close()

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self._buffers)

    @property
    def statistics(self) -> RingStatistics:
        """The counts and times up to now; on CUDA without waits that are not over yet."""
        self._copier.settle(self._statistics)
        return self._statistics

    @property
    def buffers_of_run(self) -> Sequence[torch.Tensor]:
        """The buffers that the current run uses as its slots 0, 1, ..."""
        return [self._buffers[buffer] for buffer in self._buffer_of[: self._used]]

    @property
    def device_bytes(self) -> int:
        """The bytes that the ring occupies on the compute device."""
        return sum(buffer.numel() for buffer in [*self._buffers, *self._encoded_buffers])

    def reserve(self, slots: int, slot_bytes: int, encoded_buffer_bytes: int = 0) -> None:
        """Enlarge the ring to at least these sizes; there are `ENCODED_BUFFERS` encoded buffers.

        If it must grow, it is emptied first. Raises InputError if it must grow while this thread is inside a run.
        """
        with self._lock.pause():
            largest = max((buffer.numel() for buffer in self._buffers), default=0)
            sizes = self.slots, largest, self._encoded_buffers[0].numel()
            enlarged = tuple(map(max, sizes, (slots, slot_bytes, encoded_buffer_bytes)))
            if enlarged == sizes:
                return
            self._lock.check()
            self.reset()
            # Free the old buffers first: both together may not fit into memory.
            self._views.clear()
            self._buffers.clear()
            self._encoded_buffers.clear()
            self._free_encoded.clear()
            self._take_buffers(*enlarged)

    def _take_buffers(self, slots: int, slot_bytes: int, encoded_buffer_bytes: int) -> None:
        self._buffers = _buffers(slots, slot_bytes, self.device)
        self._encoded_buffers = _buffers(ENCODED_BUFFERS, encoded_buffer_bytes, self.device)
        self._forget_runs()
        # The allocator may hand out memory that work issued so far still uses.
        issued = self._copier.event()
        self._freed = dict.fromkeys(range(slots), issued)
        for encoded in self._free_encoded:
            encoded.after = issued

    @contextlib.contextmanager
    def run(self, graph: Hashable, plan: GatherSignature) -> Iterator[None]:
        """Enter a run of `graph` by `plan`, once no other thread is in one.

        An exception in the block ends all copies, so that the next run can start; all ranks of a gather get an error.

        Raises InputError if this thread is in a run already, and the errors of `begin_run`.
        """
        with self._lock.take():
            try:
                # A second interrupt may have stopped the cleanup of the last run.
                if not self._is_quiet:
                    self._give_up("a run was interrupted")
                self._is_quiet = False
                self.begin_run(graph, plan)
                yield
                self.home.transport.end_run()
                self._is_quiet = True
            except BaseException as error:
                self._give_up(f"{type(error).__name__}: {error}")
                raise

    def begin_run(self, graph: Hashable, plan: GatherSignature) -> None:
        """Begin a run of `graph` by `plan`. Raises the errors of `before_run` and `Home.check`."""
        if check := self.before_run():
            check()
        self.home.check()
        self.home.transport.begin_run(plan)
        # Ranks that gather together refuse shards that changed, so their gathers need not wait.
        if self.home.transport.is_one_sided:
            self._copier.begin_run()
        self._graph, self._used = graph, plan.slots
        self._beginning, self._has_begun, self._fetches = {}, False, {}
        self.waits = []
        self._buffer_of = self._free
        self._free = self._buffer_of[plan.slots :]

    def prefetch(
        self, shards: Sequence[torch.Tensor], bank: BankSpec, slot: int, after: object
    ) -> SlotCopy | EncodedCopy:
        """Start to fill `slot` with `bank` once `after` has passed; return the copy for `decode` or `acquire`.

        `shards` are inputs of the graph; the home decides whether it reads them. `after` is a moment that `release`
        returned, or None if the run has not used the slot before. An encoded bank is copied before the slot is free,
        so only its decode has an `after`.

        Raises InputError if the bank is encoded, and all encoded buffers hold banks that are not yet decoded.
        """
        buffer = self._buffer_of[slot]
        fetch = Fetch(bank, self._sources_for_slot(bank, shards))
        if bank.in_parts:
            self._fetches[slot] = fetch
        if after is not None or slot in self._beginning:
            return self._begin_copy(fetch, buffer, after)
        filled = self._take_ahead(buffer, fetch) or self._begin_copy(fetch, buffer, self._freed.get(buffer))
        self._beginning[slot] = fetch
        if not isinstance(filled, EncodedCopy):
            self._fill_free_ahead()
        return filled

    def _sources_for_slot(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """Return the sources of `bank`; for a bank in parts, without the pieces of this rank's experts."""
        sources = self.home.sources(bank, shards)
        if not bank.in_parts:
            return sources
        cached = self._sources.get(bank)
        if cached is None or cached[0] is not sources:
            own_experts = expert_range(bank, self.home.rank_of(bank))
            moved = tuple(source.with_pieces(pieces_in_slot(bank, own_experts, source.pieces)) for source in sources)
            self._sources[bank] = cached = (sources, moved)
        return cached[1]

    def decode(self, copied: object, bank: BankSpec, slot: int, after: object) -> SlotCopy:
        """Start to decode `bank` into `slot` once `after` has passed; return the copy to acquire.

        `copied` comes from the bank's prefetch. `after` is a moment that `release` returned, or None if the run has not
        used the slot before. Raises InputError if the copy was decoded already.
        """
        if not isinstance(copied, EncodedCopy):
            assert isinstance(copied, SlotCopy), "prefetch returned it"
            return copied  # it was copied and decoded before this run began
        if copied.copied is None:
            raise InputError(
                f"bank {bank.name} was decoded already from this copy; a copy can be decoded once", name=bank.name
            )
        buffer = self._buffer_of[slot]
        filled = self._decode(copied, bank, buffer, self._freed.get(buffer) if after is None else after)
        self._fill_free_ahead()
        return filled

    def _fill_free_ahead(self) -> None:
        """Fill the slots that this run does not use, once it has filled all those that it uses."""
        if len(self._beginning) == self._used and not self._has_begun:
            self._has_begun = True
            self._order.learn((self._graph, self._beginning[0].bank.index), dict(self._beginning))
            for position, free in enumerate(self._free):
                self._fill_ahead(position, free)

    def acquire(self, filled: object, bank: BankSpec, slot: int) -> tuple[BankTensor, ...]:
        """Wait until `slot` is full and return the tensors of `bank`, as views of the slot.

        A tensor of a bank in parts is a tuple, in order of experts: views of the slot around a view of this shard. A
        tensor in FP8 is a `BlockScaledWeights`.

        Raises CopyError, or PeerError for a gather, if the copy failed.
        """
        assert isinstance(filled, SlotCopy), "prefetch or decode returned it"
        self.waits.append(self._copier.wait(filled, self._statistics))
        key = (self._buffer_of[slot], bank)
        if key not in self._views:
            sources = self._fetches[slot].sources if bank.in_parts else ()
            self._views[key] = self._bank_tensors(bank, self._buffers[key[0]], sources)
        return self._views[key]

    def _bank_tensors(self, bank: BankSpec, slot: torch.Tensor, sources: Sequence[Source]) -> tuple[BankTensor, ...]:
        in_slot = slot_tensors(bank, slot)
        if not bank.in_parts:
            return in_slot
        rank = self.home.rank_of(bank)
        experts = expert_range(bank, rank)
        (shard,) = [source.memory for source in sources if isinstance(source, MemorySource) and not source.over_link]
        in_shard = [tensor.view(shard) for tensor in shard_layout(bank, rank).tensors]

        def parts(index: int) -> tuple[torch.Tensor, ...]:
            tensor = in_slot[index]
            assert isinstance(tensor, torch.Tensor), "encoded banks do not come in parts"
            in_slot_experts = bank.tensors[index].shape[0] - len(experts)
            ranges = tensor[: experts.start], in_shard[index], tensor[experts.start : in_slot_experts]
            return tuple(experts_range for experts_range in ranges if len(experts_range))

        return tuple(parts(index) if index in bank.in_parts else tensor for index, tensor in enumerate(in_slot))

    def release(self, slot: int, last: bool = False) -> object:
        """Return the moment at which all work issued so far has read `slot`.

        If it is the `last` release of the slot in this run, the slot can be filled for the next run.
        """
        buffer = self._buffer_of[slot]
        if self.debug:
            self._buffers[buffer].fill_(POISON_BYTE)
        self._freed[buffer] = done = self._copier.event()
        if last:
            self._free.append(buffer)
            self._fill_ahead(len(self._free) - 1, buffer)
        return done

    def _give_up(self, reason: str) -> None:
        # This comes first, because it alone ends a copy that waits for another rank.
        self.home.transport.fail(reason)
        self.reset()

    def reset(self) -> None:
        """Abandon all copies after an exception, so that the next run starts with idle slots."""
        self._copier.quiesce()
        self._ahead.clear()
        self._order.forget_last()
        self._forget_runs()
        self._is_quiet = True

    def forget(self) -> None:
        """Drop all references to banks, because they keep deleted banks in memory; at the beginning of a run."""
        for buffer in list(self._ahead):
            self._drop_ahead(buffer)
        self._copier.quiesce()
        self._dropped.clear()
        for encoded in self._free_encoded:
            encoded.decoded = None
        self._order = LearnedOrder()
        self._views.clear()
        self._sources.clear()
        self._fetches.clear()

    def _forget_runs(self) -> None:
        self._buffer_of = list(range(self.slots))
        self._free = list(range(self.slots))
        self._freed = {}
        self._free_encoded = deque(map(EncodedBuffer, self._encoded_buffers))
        self._dropped.clear()
        self._beginning, self._has_begun = {}, False
        self._graph, self._used = None, 0

    def _fill_ahead(self, slot: int, buffer: int) -> None:
        """Start to fill `buffer`, the next run's `slot`, with the bank that the next run is expected to ask for."""
        # All ranks take part in a gather, and the other ranks may not make the same guess.
        beginning = self._order.next() if self.home.transport.is_one_sided else None
        fetch = None if beginning is None else beginning.get(slot)
        if fetch is None or (contents := fetch.contents()) is None:
            return
        ahead = self._ahead.get(buffer)
        if ahead is not None and ahead.contents == contents:
            return
        self._drop_ahead(buffer)
        if fetch.bank.format.is_encoded and not self._free_encoded:
            return
        filled = self._begin_copy(fetch, buffer, self._freed.get(buffer))
        if isinstance(filled, EncodedCopy):
            filled = self._decode(filled, fetch.bank, buffer, self._freed.get(buffer))
        self._ahead[buffer] = Ahead(fetch, contents, filled)

    def _take_ahead(self, buffer: int, fetch: Fetch) -> SlotCopy | None:
        ahead = self._ahead.get(buffer)
        if ahead is None or ahead.contents != fetch.contents():
            self._drop_ahead(buffer)
            return None
        self._statistics.ahead_used += 1
        return self._ahead.pop(buffer).filled

    def _drop_ahead(self, buffer: int) -> None:
        ahead = self._ahead.pop(buffer, None)
        if ahead is not None:
            self._statistics.ahead_wasted += 1
            self._copier.abandon(ahead.filled)
            self._dropped[buffer] = ahead.filled

    def _begin_copy(self, fetch: Fetch, buffer: int, after: object) -> SlotCopy | EncodedCopy:
        """Start the copy of a prefetch: into `buffer` once `after` has passed, or into an encoded buffer."""
        is_encoded = fetch.bank.format.is_encoded
        if is_encoded and not self._free_encoded:
            raise InputError(
                f"bank {fetch.bank.name} cannot be copied: the {ENCODED_BUFFERS} encoded buffers hold banks that are "
                "not yet decoded; decode one of them first",
                name=fetch.bank.name,
            )
        self.home.copying(fetch.bank)
        self._statistics.copies += 1
        self._statistics.copied_bytes += sum(source.nbytes for source in fetch.sources)
        self._statistics.link_bytes += sum(source.nbytes for source in fetch.sources if source.over_link)
        if not is_encoded:
            return self._copier.submit(fetch, self._buffers[buffer], after, self._dropped.pop(buffer, None))
        encoded = self._free_encoded.popleft()
        target = encoded.memory[: fetch.bank.format.link_bytes]
        return EncodedCopy(self._copier.submit(fetch, target, encoded.after, encoded.decoded), encoded)

    def _decode(self, encoded_copy: EncodedCopy, bank: BankSpec, buffer: int, after: object) -> SlotCopy:
        """Start to decode `bank` into `buffer` once `after` has passed, and let copies have its encoded buffer."""
        self._statistics.decodes += 1
        # A dropped copy into the buffer precedes the copy whose bytes are decoded, and a dropped decode this decode.
        self._dropped.pop(buffer, None)
        copied, encoded_copy.copied = encoded_copy.copied, None
        assert copied is not None, "it is decoded once"
        encoded = encoded_copy.buffer
        memory, slot = encoded.memory[: bank.format.link_bytes], self._buffers[buffer][: bank.format.slot_bytes]
        encoded.decoded = self._copier.decode(copied, functools.partial(decode_bank, bank), memory, slot, after)
        encoded.after = None
        self._free_encoded.append(encoded)
        return encoded.decoded


def _buffers(slots: int, slot_bytes: int, device: torch.device) -> list[torch.Tensor]:
    with torch.inference_mode(False):  # inference tensors could not be written outside that mode
        if device.type == "cpu":
            return [empty_in_huge_pages((slot_bytes,), torch.uint8) for _ in range(slots)]
        return [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]


def make_ring(slots: int, slot_bytes: int, device: torch.device, link: Link, home: Home = _THIS_PROCESS) -> Ring:
    """Return a ring on `device` that is filled from banks of `home`.

    Raises InputError if the device does not exist, or rings do not support its kind.
    """
    return Ring(slots, slot_bytes, device, make_copier(device, link, home), home)


def make_copier(device: torch.device, link: Link, home: Home) -> Copier:
    """Return the copier from `home` to `device`. Raises InputError or OptionError if no copier can do that."""
    check_link_to(device, link)
    transport = home.transport
    if device.type == "cpu":
        return Copier(HOST_LANE, transport, transport.copy_thread(link), link)
    if device.type != "cuda":
        raise InputError.wrong("device", str(device), "cpu or cuda, to which experts stream")
    # Ranks that gather together have to meet on the host first.
    needs_thread = home.needs_host or not transport.is_one_sided
    return Copier(StreamLane(device), transport, transport.copy_thread(link) if needs_thread else None)

"""The ring: a fixed set of slots on the compute device, and the operations that a schedule uses on them.

`passes/ir/slot_operations.py` defines `prefetch`, `decode`, `acquire` and `release`. A ring serves one run at a time:
`run` holds its lock, so threads that call compiled graphs of one model take turns. A thread that is in a run already
must not wait for itself, nor may it overwrite the slots of its own run; it gets an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import torch

from moepass.models.errors import InputError
from moepass.passes.ir.plan import BankSpec, GatherSignature
from moepass.passes.ir.shards import expert_range, pieces_in_slot, shard_layout, slot_layout
from moepass.runtime.kernels.decoders import codec_of
from moepass.runtime.system.huge_pages import empty_in_huge_pages
from moepass.runtime.system.non_reentrant_lock import NonReentrantLock
from moepass.runtime.transfer.copier import Copier, RingStatistics, Wait
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.issuing_copier import IssuingCopier
from moepass.runtime.transfer.learned_order import Fetch, LearnedOrder
from moepass.runtime.transfer.link import Link, check_link_to
from moepass.runtime.transfer.sources import MemorySource, Source
from moepass.runtime.transfer.stream_copier import StreamCopier
from moepass.runtime.transfer.thread_copier import ThreadCopier

# All bits set is a NaN in every floating type that experts come in: fp32, bf16, fp16, fp8 e4m3fn and e5m2.
POISON_BYTE = 0xFF

_THIS_PROCESS = Home()
# A tensor of a bank [experts, ...]; of one in parts, those of the ranks before, of this rank, and of the ranks behind.
BankTensor = torch.Tensor | tuple[torch.Tensor, ...]
_REENTERED = (
    "another run of this model is under way in this thread: a custom operator, a hook or a signal handler called the "
    "model while it ran, and its experts stream through one ring, which serves one run at a time; call the model after "
    "that run, or a second model that was offloaded by itself"
)


@dataclasses.dataclass
class EncodedCopy:
    """An encoded bank on its way into the encoded buffer; None once its decode was issued."""

    copied: object | None


@dataclasses.dataclass
class Ahead:
    """A slot that is being filled, or full, before a run has asked for it.

    `fetch` keeps the memory by which `contents` are known: no other bank can lie there meanwhile.
    """

    fetch: Fetch
    contents: Hashable
    filled: object


class Ring:
    """`slots` buffers of `slot_bytes` on `device`; banks are copied into them by a copy thread or a copy stream.

    A schedule numbers its slots 0, 1, ... in the order in which it first fills them. Which buffers these are is
    decided run by run: slot 0 is the buffer that has been free for longest. So the buffer that falls free first at the
    end of a run is the one that the next run needs first, and it can be filled right then, with the bank that followed
    the last time. A guess that turns out wrong costs a copy, never a result: the run starts its own copy instead.
    """

    # The run under way: its graph, how many slots it uses, which buffers these are, and what it put into free ones.
    _graph: Hashable
    _used: int
    _buffer_of: list[int]
    _beginning: dict[int, Fetch]
    _has_begun: bool
    # Buffers that no run is using, the one that has been free for longest first; and since when buffers are free.
    _free: list[int]
    _freed: dict[int, object]

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        device: torch.device,
        copier: Copier,
        home: Home = _THIS_PROCESS,
    ) -> None:
        self.device = device
        self.home = home
        # Whether released slots are filled with NaN.
        self.debug = False
        self._lock = NonReentrantLock(_REENTERED)
        self._is_quiet = True
        self._statistics = RingStatistics()
        self._copier = copier
        self._views: dict[tuple[int, BankSpec], tuple[BankTensor, ...]] = {}
        # Of banks in parts: the home's sources, and what of them goes into a slot.
        self._sources: dict[BankSpec, tuple[Sequence[Source], tuple[Source, ...]]] = {}
        # What the present run has asked for, by slot.
        self._fetches: dict[int, Fetch] = {}
        self._order: LearnedOrder[Hashable, dict[int, Fetch]] = LearnedOrder()
        self._ahead: dict[int, Ahead] = {}
        self._waits: list[Wait] = []
        self._take_buffers(slots, slot_bytes, 0)

    def __del__(self) -> None:
        # Before the buffers go: whoever is given their memory next does not wait for those who still use it.
        copier = getattr(self, "_copier", None)
        if copier is not None:
            copier.close()

    @property
    def slots(self) -> int:
        return len(self._buffers)

    @property
    def statistics(self) -> RingStatistics:
        """Up to now; on CUDA without waits that are not over yet."""
        self._copier.settle(self._statistics)
        return self._statistics

    @property
    def waits(self) -> Sequence[Wait]:
        """The waits of the present run, or of the last one."""
        return self._waits

    @property
    def buffers_of_run(self) -> Sequence[torch.Tensor]:
        """The buffers that the present run uses as its slots 0, 1, ..."""
        return [self._buffers[buffer] for buffer in self._buffer_of[: self._used]]

    @property
    def device_bytes(self) -> int:
        """Bytes that the ring occupies on the compute device."""
        return sum(buffer.numel() for buffer in [*self._buffers, self._encoded_buffer])

    def reserve(self, slots: int, slot_bytes: int, encoded_buffer_bytes: int = 0) -> None:
        """Make the ring larger where it is smaller than that: between two runs, which then begin with empty slots.

        Raises InputError inside a run of the same thread.
        """
        with self._lock.pause():
            largest = max((buffer.numel() for buffer in self._buffers), default=0)
            encoded_buffer_bytes = max(encoded_buffer_bytes, self._encoded_buffer.numel())
            if slots <= self.slots and slot_bytes <= largest and encoded_buffer_bytes == self._encoded_buffer.numel():
                return
            self._lock.check()
            slots, slot_bytes = max(slots, self.slots), max(slot_bytes, largest)
            self.reset()
            # The old ones go first: for a moment both would be too much.
            self._views.clear()
            self._buffers.clear()
            del self._encoded_buffer
            self._take_buffers(slots, slot_bytes, encoded_buffer_bytes)

    def _take_buffers(self, slots: int, slot_bytes: int, encoded_buffer_bytes: int) -> None:
        self._buffers = _buffers(slots, slot_bytes, self.device)
        # Where encoded banks wait for their decode.
        (self._encoded_buffer,) = _buffers(1, encoded_buffer_bytes, self.device)
        self._forget_runs()
        # The allocator may hand out memory that work issued so far still uses.
        self._freed = dict.fromkeys(range(slots), self._copier.event())

    @contextlib.contextmanager
    def run(self, graph: Hashable, plan: GatherSignature) -> Iterator[None]:
        """A run of `graph` by `plan`, once no other thread is in one; an exception leaves a quiet ring.

        Where ranks gather together, an exception ends that for all of them. Raises InputError where this thread is in a
        run already, and what `begin_run` raises.
        """
        with self._lock.take():
            try:
                # A second interrupt may have stopped the previous cleanup.
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
        """A run of `graph` by `plan` begins. Raises what `Home.check` of the banks' home raises."""
        self.home.check()
        self.home.transport.begin_run(plan)
        self._graph, self._used = graph, plan.slots
        self._beginning, self._has_begun, self._fetches = {}, False, {}
        self._waits = []
        self._buffer_of = self._free
        self._free = self._buffer_of[plan.slots :]

    def prefetch(self, shards: Sequence[torch.Tensor], bank: BankSpec, slot: int, after: object) -> object:
        """Start to fill `slot` once `after`, an event that `release` gave or None, has happened."""
        buffer = self._buffer_of[slot]
        fetch = self._fetches[slot] = Fetch(bank, self._sources_for_slot(bank, shards))
        if after is not None:
            return self._begin_copy(fetch, buffer, after)
        filled = self._take_ahead(buffer, fetch) or self._begin_copy(fetch, buffer, self._freed.get(buffer))
        self._beginning[slot] = fetch
        if not isinstance(filled, EncodedCopy):
            self._fill_free_ahead()
        return filled

    def _sources_for_slot(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """The sources of `bank`; of what comes in parts, they have no pieces of this rank's experts."""
        sources = self.home.sources(bank, shards)
        if not bank.in_parts:
            return sources
        known = self._sources.get(bank)
        if known is None or known[0] is not sources:
            own = expert_range(bank, self.home.rank_of(bank))
            moved = tuple(source.with_pieces(pieces_in_slot(bank, own, source.pieces)) for source in sources)
            self._sources[bank] = known = (sources, moved)
        return known[1]

    def decode(self, copied: object, bank: BankSpec, slot: int) -> object:
        """Fill `slot` with what `copied`, which `prefetch` gave last, brings; the event "the slot is full".

        Raises InputError where that was decoded already.
        """
        if not isinstance(copied, EncodedCopy):
            return copied  # it was brought and decoded before this run began
        if copied.copied is None:
            raise InputError(
                f"bank {bank.name} was decoded already from this copy, which can be done once", name=bank.name
            )
        filled = self._decode(copied.copied, bank, self._buffer_of[slot])
        copied.copied = None
        self._fill_free_ahead()
        return filled

    def _fill_free_ahead(self) -> None:
        """Once the run has filled all of its slots for the first time: those that it does not use."""
        if len(self._beginning) == self._used and not self._has_begun:
            self._has_begun = True
            self._order.learn((self._graph, self._beginning[0].bank.index), dict(self._beginning))
            for position, free in enumerate(self._free):
                self._fill_ahead(position, free)

    def acquire(self, filled: object, bank: BankSpec, slot: int) -> tuple[BankTensor, ...]:
        """The bank's tensors, as views of the slot, once it is full; what comes in parts, also of this rank's shard.

        Raises CopyError where the copy failed.
        """
        self._waits.append(self._copier.wait(filled, self._statistics))
        key = (self._buffer_of[slot], bank)
        if key not in self._views:
            self._views[key] = self._bank_tensors(bank, self._buffers[key[0]], self._fetches[slot].sources)
        return self._views[key]

    def _bank_tensors(self, bank: BankSpec, slot: torch.Tensor, sources: Sequence[Source]) -> tuple[BankTensor, ...]:
        in_slot = [tensor.view(slot) for tensor in slot_layout(bank).tensors]
        if not bank.in_parts:
            return tuple(in_slot)
        rank = self.home.rank_of(bank)
        experts = expert_range(bank, rank)
        (shard,) = [source.memory for source in sources if isinstance(source, MemorySource) and not source.over_link]
        own = [tensor.view(shard) for tensor in shard_layout(bank, rank).tensors]

        def parts(place: int) -> tuple[torch.Tensor, ...]:
            behind = bank.tensors[place].shape[0] - len(experts)
            found = in_slot[place][: experts.start], own[place], in_slot[place][experts.start : behind]
            return tuple(part for part in found if len(part))

        return tuple(parts(place) if place in bank.in_parts else tensor for place, tensor in enumerate(in_slot))

    def release(self, slot: int, last: bool = False) -> object:
        """The event "everything issued so far has read the slot". `last`: this run will not use the slot again."""
        buffer = self._buffer_of[slot]
        if self.debug:
            self._buffers[buffer].fill_(POISON_BYTE)
        self._freed[buffer] = done = self._copier.event()
        if last:
            self._free.append(buffer)
            self._fill_ahead(len(self._free) - 1, buffer)
        return done

    def _give_up(self, reason: str) -> None:
        # First, because a copy that waits for another rank ends by this alone.
        self.home.transport.fail(reason)
        self.reset()

    def reset(self) -> None:
        """Abandon what is under way after an exception, so that the next run finds a quiet ring."""
        self._copier.quiesce()
        self._ahead.clear()
        self._order.forget_last()
        self._forget_runs()
        self._is_quiet = True

    def forget(self) -> None:
        """As a run begins: drop what is remembered of banks, which keeps the memory of those that are gone."""
        for buffer in list(self._ahead):
            self._drop_ahead(buffer)
        self._copier.quiesce()
        self._order = LearnedOrder()
        for remembered in (self._views, self._sources, self._fetches):
            remembered.clear()

    def _forget_runs(self) -> None:
        self._buffer_of = list(range(self.slots))
        self._free = list(range(self.slots))
        self._freed = {}
        self._beginning, self._has_begun = {}, False
        self._graph, self._used = None, 0

    def _fill_ahead(self, slot: int, buffer: int) -> None:
        """Start to fill `buffer`, which will be the next run's `slot`, with what that run is expected to ask for."""
        # A guess that other ranks do not make too is a transfer in which nobody joins.
        beginning = self._order.next() if self.home.transport.is_one_sided else None
        fetch = None if beginning is None else beginning.get(slot)
        if fetch is None or (contents := fetch.contents()) is None:
            return
        ahead = self._ahead.get(buffer)
        if ahead is not None and ahead.contents == contents:
            return
        self._drop_ahead(buffer)
        filled = self._begin_copy(fetch, buffer, self._freed.get(buffer))
        if isinstance(filled, EncodedCopy):
            filled = self._decode(filled.copied, fetch.bank, buffer)
        self._ahead[buffer] = Ahead(fetch, contents, filled)

    def _take_ahead(self, buffer: int, fetch: Fetch) -> object:
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

    def _begin_copy(self, fetch: Fetch, buffer: int, after: object) -> object:
        """Start the copy of a prefetch. The decode of an encoded bank must come before any other copy."""
        self.home.copying(fetch.bank)
        self._statistics.copies += 1
        self._statistics.copied_bytes += sum(source.nbytes for source in fetch.sources)
        self._statistics.link_bytes += sum(source.nbytes for source in fetch.sources if source.over_link)
        found = fetch.bank.format
        if not found.is_encoded:
            return self._copier.submit(fetch, self._buffers[buffer], after)
        return EncodedCopy(self._copier.submit(fetch, self._encoded_buffer[: found.link_bytes], after))

    def _decode(self, copied: object, bank: BankSpec, buffer: int) -> object:
        found = bank.format
        self._statistics.decodes += 1
        link, slot = self._encoded_buffer[: found.link_bytes], self._buffers[buffer][: found.slot_bytes]
        return self._copier.decode(copied, codec_of(found.decoder).decode, link, slot)


def _buffers(slots: int, slot_bytes: int, device: torch.device) -> list[torch.Tensor]:
    with torch.inference_mode(False):  # inference tensors could not be written outside that mode
        if device.type == "cpu":
            return [empty_in_huge_pages((slot_bytes,), torch.uint8) for _ in range(slots)]
        return [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]


def make_ring(slots: int, slot_bytes: int, device: torch.device, link: Link, home: Home = _THIS_PROCESS) -> Ring:
    """The ring for `device`, filled from banks that rest in `home`.

    Raises InputError where the device is not there or no ring exists for its kind.
    """
    return Ring(slots, slot_bytes, device, make_copier(device, link, home), home)


def make_copier(device: torch.device, link: Link, home: Home) -> Copier:
    """The copier that copies banks of `home` to `device`. Raises InputError and OptionError if none can."""
    check_link_to(device, link)
    if device.type == "cpu":
        return ThreadCopier(home.transport, link)
    if device.type != "cuda":
        raise InputError.wrong("device", str(device), "cpu or cuda, to which experts stream")
    # Ranks that gather together have to meet first.
    is_issued = home.needs_host or not home.transport.is_one_sided
    return IssuingCopier(device, home.transport, link) if is_issued else StreamCopier(device)

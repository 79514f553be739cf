"""Input of the simulator: the steps of a schedule, each with its seconds.

They come from a `Plan` with the seconds of its segments and banks. Without a graph they come from a sequence of phases:
the computations of a model of that architecture, one after the other, each with the bank that it reads.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from moepass.passes.ir.bank_format import ENCODED_BUFFERS, ring_bytes
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PlanError
from moepass.passes.ir.shards import slot_layout
from moepass.passes.ir.timeline import COPY


@dataclasses.dataclass(frozen=True)
class LayerPhase:
    """A stretch of computation that reads at most one bank, from its beginning to its end.

    Attributes:
        bank_bytes: bytes of the bank; 0 for attention or a dense layer
        transfer_seconds: seconds of the bank's transfer, into a slot if it is not encoded
        link: banks with the same link are transferred one after the other, over different links at the same time
        number: number of the layer; -1 if it has none
        shard_bytes: bytes of this rank's shard on the device, if the bank is streamed; a resident bank is complete
        read_in_place_bytes: bytes of the shard that are read in place, so that a slot lacks them (see
            `passes/segments/bank_parts.py`)
        encoded_bytes: bytes of the buffer from which the bank is decoded into its slot; 0 without a decoder
        decode_seconds: seconds of the bank's decoding
    """

    name: str
    layer: str
    compute_seconds: float
    bank_bytes: int = 0
    transfer_seconds: float = 0.0
    link: str = COPY
    number: int = -1
    shard_bytes: int = 0
    read_in_place_bytes: int = 0
    encoded_bytes: int = 0
    decode_seconds: float = 0.0

    @property
    def is_encoded(self) -> bool:
        """True if the bank is decoded into its slot."""
        return self.encoded_bytes > 0

    @property
    def write_seconds(self) -> float:
        """Seconds in which the bank's slot is filled."""
        return self.decode_seconds if self.is_encoded else self.transfer_seconds

    @property
    def slot_bytes(self) -> int:
        """Bytes of the bank in a slot."""
        return self.bank_bytes - self.read_in_place_bytes

    @property
    def stay_bytes(self) -> int:
        """Additional bytes of the bank if it is resident, without slots."""
        return self.bank_bytes - self.shard_bytes


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """One step of a schedule, in host order: `op` as in `Step`.

    Attributes:
        seconds: compute time of a segment, transfer time of a prefetch, or time of a decode
        nbytes: bytes of the bank in a slot
        is_encoded: the prefetch is followed by a decode, which fills the slot
    """

    op: str
    layer: str
    seconds: float = 0.0
    slot: int = -1
    nbytes: int = 0
    link: str = COPY
    is_encoded: bool = False


def plan_steps(
    plan: Plan,
    segment_seconds: Sequence[float],
    transfer_seconds: Mapping[int, float],
    decode_seconds: Mapping[int, float] | None = None,
) -> tuple[TimedStep, ...]:
    """Return the steps of `plan` with their seconds.

    Raises ValueError unless there is one number for each segment, and KeyError if a bank has none.

    Args:
        plan: The plan.
        segment_seconds: Seconds of the segments, in the order in which they run.
        transfer_seconds: Seconds of the banks' transfers, by index.
        decode_seconds: Seconds of the encoded banks' decodes, by index.
    """
    segments = sum(step.op == "segment" for step in plan.steps)
    if segments != len(segment_seconds):
        raise ValueError(f"the plan has {segments} segments, but there are seconds for {len(segment_seconds)}")
    remaining = iter(segment_seconds)
    steps = []
    for step in plan.steps:
        if step.op == "segment":
            steps.append(TimedStep("segment", step.name, next(remaining)))
            continue
        assert step.bank is not None
        assert step.slot is not None
        bank, seconds = plan.bank(step.bank), 0.0
        if step.op == "prefetch":
            seconds = transfer_seconds[step.bank]
        elif step.op == "decode":
            seconds = (decode_seconds or {})[step.bank]
        nbytes, is_encoded = slot_layout(bank).nbytes, bank.format.is_encoded
        steps.append(TimedStep(step.op, bank.name, seconds, step.slot, nbytes, is_encoded=is_encoded))
    return tuple(steps)


def streamed_phases(phases: Sequence[LayerPhase], resident: Collection[int] = ()) -> tuple[int, ...]:
    """Return the positions of the phases whose bank passes through a slot: all with a bank, except `resident`."""
    return tuple(index for index, phase in enumerate(phases) if phase.bank_bytes > 0 and index not in resident)


@dataclasses.dataclass(frozen=True)
class RingSchedule:
    """The resident banks and the streamed banks, as positions of phases.

    Attributes:
        slots, slot_bytes: size of the ring
        resident: phases whose banks are resident on the device
        order: all other phases with a bank, in the order of need
        shard_bytes: bytes of the shards of streamed banks on the device
        encoded_buffer_bytes: size of each buffer from which encoded banks are decoded into slots
    """

    slots: int
    slot_bytes: int
    resident: tuple[int, ...]
    order: tuple[int, ...]
    resident_bytes: int
    shard_bytes: int
    encoded_buffer_bytes: int

    @property
    def distance(self) -> int:
        """Number of MoE layers by which the transfer of a bank starts before its use."""
        return max(0, self.slots - 1)

    @property
    def ring_bytes(self) -> int:
        """Bytes of slots and of encoded buffers."""
        return ring_bytes(self.slots, self.slot_bytes, self.encoded_buffer_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of banks, shards and the ring on the device."""
        return self.resident_bytes + self.shard_bytes + self.ring_bytes


def ring_schedule(phases: Sequence[LayerPhase], slots: int, resident: Collection[int]) -> RingSchedule:
    """Return the schedule with these residents. It has at most as many slots as streamed banks."""
    order = streamed_phases(phases, resident)
    return RingSchedule(
        slots=min(slots, len(order)),
        slot_bytes=max((phases[position].slot_bytes for position in order), default=0),
        resident=tuple(sorted(resident)),
        order=order,
        resident_bytes=sum(phases[position].bank_bytes for position in resident),
        shard_bytes=sum(phases[position].shard_bytes for position in order),
        encoded_buffer_bytes=max((phases[position].encoded_bytes for position in order), default=0),
    )


def phase_steps(phases: Sequence[LayerPhase], slots: int, resident: Collection[int] = ()) -> tuple[TimedStep, ...]:
    """Return the schedule of `phases` over `slots` slots, as passes `plan` and `schedule` would make it for a graph.

    Banks are copied in the order of need, each as early as link and slots allow: bank k goes into the slot of bank
    k - slots, after that bank's phase is done. An encoded bank is copied earlier, once an encoded buffer is free.

    Raises PlanError if there is no slot for phases with banks.
    """
    needed = streamed_phases(phases, resident)
    if needed and slots < 1:
        raise PlanError(
            f"slots is {slots}; phases with banks need 1 or more", name="slots", value=slots, expected="1 or more"
        )
    turn_of = {position: turn for turn, position in enumerate(needed)}
    steps: list[TimedStep] = []
    to_copy, to_fill = deque(needed), deque(needed)

    def add(op: str, position: int, seconds: float = 0.0) -> None:
        phase = phases[position]
        slot, nbytes = turn_of[position] % slots, phase.slot_bytes
        steps.append(TimedStep(op, phase.layer, seconds, slot, nbytes, phase.link, phase.is_encoded))

    def copy() -> None:
        position = to_copy.popleft()
        add("prefetch", position, phases[position].transfer_seconds)

    def fill() -> None:
        position = to_fill.popleft()
        if len(to_fill) < len(to_copy):
            copy()
        if phases[position].is_encoded:
            add("decode", position, phases[position].decode_seconds)

    def copy_ahead() -> None:
        while to_copy and phases[to_copy[0]].is_encoded and len(to_fill) - len(to_copy) < ENCODED_BUFFERS:
            copy()

    for _ in needed[:slots]:
        fill()
    copy_ahead()
    for position, phase in enumerate(phases):
        computing = TimedStep("segment", phase.name, phase.compute_seconds)
        if position not in turn_of:
            steps.append(computing)
            continue
        add("acquire", position)
        steps.append(computing)
        add("release", position)
        if to_fill:
            fill()
            copy_ahead()
    return tuple(steps)

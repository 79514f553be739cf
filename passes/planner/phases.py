"""Input of the simulator: the steps of a schedule, each with its seconds.

They come from a `Plan` with the seconds of its segments and banks. Without a graph they come from a sequence of phases:
the computations of a model of that architecture, one after the other, each with the bank that it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from moepass.passes.ir.bank_format import ring_bytes
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PlanError
from moepass.passes.ir.shards import slot_layout
from moepass.passes.ir.timeline import COPY


@dataclasses.dataclass(frozen=True)
class LayerPhase:
    """A stretch of computation that reads at most one bank, from its beginning to its end.

    Attributes:
        bank_bytes: bytes of the bank; 0 for attention or a dense layer
        transfer_seconds: seconds of the bank's transfer into a slot
        link: banks with the same link are transferred one after the other, over different links at the same time
        number: number of the layer; -1 if it has none
        shard_bytes: bytes of this rank's shard on the device, if the bank is streamed; a resident bank is complete
        read_in_place_bytes: bytes of the shard that are read in place, so that a slot lacks them (see
            `passes/segments/bank_parts.py`)
        encoded_bytes: bytes of the buffer from which the bank is decoded into its slot; 0 without a decoder
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
        seconds: compute time of a segment, or transfer time of a prefetch
        nbytes: bytes of the bank in a slot
    """

    op: str
    layer: str
    seconds: float = 0.0
    slot: int = -1
    nbytes: int = 0
    link: str = COPY


def plan_steps(
    plan: Plan, segment_seconds: Sequence[float], transfer_seconds: Mapping[int, float]
) -> tuple[TimedStep, ...]:
    """Return the steps of `plan` with their seconds.

    Raises ValueError unless there is one number for each segment, and KeyError if a bank has none.

    Args:
        plan: The plan.
        segment_seconds: Seconds of the segments, in the order in which they run.
        transfer_seconds: Seconds of the banks' transfers, by index.
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
        if step.op == "decode":
            continue  # a part of the transfer
        assert step.bank is not None
        assert step.slot is not None
        bank = plan.bank(step.bank)
        seconds = transfer_seconds[step.bank] if step.op == "prefetch" else 0.0
        steps.append(TimedStep(step.op, bank.name, seconds, step.slot, slot_layout(bank).nbytes))
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

    Banks are copied in the order of need, each as early as link and slots allow: copy k goes into the slot of copy
    k - slots, after that copy's phase is done.

    Raises PlanError if there is no slot for phases with banks.
    """
    needed = streamed_phases(phases, resident)
    if needed and slots < 1:
        raise PlanError(
            f"slots is {slots}; phases with banks need 1 or more", name="slots", value=slots, expected="1 or more"
        )
    turn_of = {position: turn for turn, position in enumerate(needed)}

    def step(op: str, position: int, seconds: float = 0.0) -> TimedStep:
        phase = phases[position]
        return TimedStep(op, phase.layer, seconds, turn_of[position] % slots, phase.slot_bytes, phase.link)

    steps = [step("prefetch", position, phases[position].transfer_seconds) for position in needed[:slots]]
    for position, phase in enumerate(phases):
        computing = TimedStep("segment", phase.name, phase.compute_seconds)
        if position not in turn_of:
            steps.append(computing)
            continue
        steps += [step("acquire", position), computing, step("release", position)]
        for following in needed[turn_of[position] + slots : turn_of[position] + slots + 1]:
            steps.append(step("prefetch", following, phases[following].transfer_seconds))
    return tuple(steps)

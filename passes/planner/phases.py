"""Input of the simulator: the steps of a schedule, each with its seconds.

They come from a `Plan` and the seconds of its segments and banks, or, where there is no graph, from a sequence of
phases: what a model of that architecture computes, one after the other, and the bank that each phase reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PlanError
from moepass.passes.ir.shards import slot_layout
from moepass.passes.ir.timeline import COPY


@dataclasses.dataclass(frozen=True)
class LayerPhase:
    """A stretch of computation that reads at most one bank from its beginning to its end.

    `bank_bytes` is 0 where it reads none: attention, a dense layer. `transfer_seconds` is what it takes to bring the
    bank into a slot. Banks with the same `link` come one after the other, over different links side by side. `number`
    is that of the layer, -1 where it has none. `shard_bytes` are those of this rank's shard on the device, which a bank
    has there only where it is streamed: one that stays is there as a whole. `read_in_place_bytes` of that shard are
    read there, and a slot lacks them (see `passes/segments/bank_parts.py`).
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

    @property
    def slot_bytes(self) -> int:
        """What the bank takes in a slot."""
        return self.bank_bytes - self.read_in_place_bytes

    @property
    def stay_bytes(self) -> int:
        """What the bank takes more where it stays, slots left out of account."""
        return self.bank_bytes - self.shard_bytes


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """One step of a schedule, in host order: `op` as in `Step`.

    `seconds` is the compute time of a segment, or the transfer time of a prefetch. `nbytes` are those of the bank in a
    slot.
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
    """The steps of `plan`: seconds of its segments in the order in which they run, and of its banks by index.

    Raises ValueError where there are not as many seconds as segments, KeyError where a bank has none.
    """
    segments = sum(step.op == "segment" for step in plan.steps)
    if segments != len(segment_seconds):
        raise ValueError(f"the plan has {segments} segments, and {len(segment_seconds)} have their seconds given")
    remaining = iter(segment_seconds)
    steps = []
    for step in plan.steps:
        if step.op == "segment":
            steps.append(TimedStep("segment", step.name, next(remaining)))
            continue
        if step.op == "decode":
            continue  # a part of the transfer, which is not timed by itself
        assert step.bank is not None
        assert step.slot is not None
        bank = plan.bank(step.bank)
        seconds = transfer_seconds[step.bank] if step.op == "prefetch" else 0.0
        steps.append(TimedStep(step.op, bank.name, seconds, step.slot, slot_layout(bank).nbytes))
    return tuple(steps)


def streamed_phases(phases: Sequence[LayerPhase], resident: Collection[int] = ()) -> tuple[int, ...]:
    """Positions of the phases whose bank passes through a slot: all with a bank, but those at positions `resident`."""
    return tuple(place for place, phase in enumerate(phases) if phase.bank_bytes > 0 and place not in resident)


@dataclasses.dataclass(frozen=True)
class RingSchedule:
    """`resident` and `order` are positions of phases: the banks that stay, and the others in the order of need.

    The others pass through `slots` slots of `slot_bytes`, and their shards take `shard_bytes`.
    """

    slots: int
    slot_bytes: int
    resident: tuple[int, ...]
    order: tuple[int, ...]
    resident_bytes: int
    shard_bytes: int

    @property
    def distance(self) -> int:
        """How many layers with experts ahead of its use a bank starts to move."""
        return max(0, self.slots - 1)

    @property
    def memory_bytes(self) -> int:
        return self.resident_bytes + self.shard_bytes + self.slots * self.slot_bytes


def ring_schedule(phases: Sequence[LayerPhase], slots: int, resident: Collection[int]) -> RingSchedule:
    """The schedule with these residents; no more slots than there are banks to stream."""
    order = streamed_phases(phases, resident)
    return RingSchedule(
        slots=min(slots, len(order)),
        slot_bytes=max((phases[place].slot_bytes for place in order), default=0),
        resident=tuple(sorted(resident)),
        order=order,
        resident_bytes=sum(phases[place].bank_bytes for place in resident),
        shard_bytes=sum(phases[place].shard_bytes for place in order),
    )


def phase_steps(phases: Sequence[LayerPhase], slots: int, resident: Collection[int] = ()) -> tuple[TimedStep, ...]:
    """The schedule of `phases` over `slots` slots, as the passes plan and schedule would make it of a graph.

    Banks are copied in the order in which phases need them, each as early as link and slots allow: copy k goes into
    the slot of the copy k - slots, once its phase is done.

    Raises PlanError where there is no slot for phases with banks.
    """
    needed = streamed_phases(phases, resident)
    if needed and slots < 1:
        raise PlanError(
            f"slots is {slots}; phases with banks need 1 or more", name="slots", value=slots, expected="1 or more"
        )
    turn_of = {place: turn for turn, place in enumerate(needed)}

    def step(op: str, place: int, seconds: float = 0.0) -> TimedStep:
        phase = phases[place]
        return TimedStep(op, phase.layer, seconds, turn_of[place] % slots, phase.slot_bytes, phase.link)

    steps = [step("prefetch", place, phases[place].transfer_seconds) for place in needed[:slots]]
    for place, phase in enumerate(phases):
        computing = TimedStep("segment", phase.name, phase.compute_seconds)
        if place not in turn_of:
            steps.append(computing)
            continue
        steps += [step("acquire", place), computing, step("release", place)]
        for following in needed[turn_of[place] + slots : turn_of[place] + slots + 1]:
            steps.append(step("prefetch", following, phases[following].transfer_seconds))
    return tuple(steps)

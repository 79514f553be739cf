"""What a simulator executes: the steps of a schedule, each with the seconds that it takes.

They come from a `Plan` and the seconds of its segments and banks, or, where there is no graph, from a sequence of
stages: what a model of that architecture computes, one after the other, and the bank that each stage reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PlanError
from moepass.passes.ir.timeline import COPY


@dataclasses.dataclass(frozen=True)
class LayerPhase:
    """A stretch of computation that reads at most one bank from its beginning to its end.

    `bank_bytes` is 0 where it reads none: attention, a dense layer. `transfer_seconds` is what it takes to bring the
    bank into a slot. Banks with the same `link` come one after the other, over different links side by side.
    """

    name: str
    layer: str
    compute_seconds: float
    bank_bytes: int = 0
    transfer_seconds: float = 0.0
    link: str = COPY


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
        steps.append(TimedStep(step.op, bank.name, seconds, step.slot, bank.format.slot_bytes))
    return tuple(steps)


def streamed_stages(stages: Sequence[LayerPhase], resident: Collection[int] = ()) -> tuple[int, ...]:
    """Positions of the stages whose bank passes through a slot: all with a bank, but those at positions `resident`."""
    return tuple(place for place, stage in enumerate(stages) if stage.bank_bytes > 0 and place not in resident)


def stage_steps(
    stages: Sequence[LayerPhase], slots: int, resident: Collection[int] = (), order: Sequence[int] | None = None
) -> tuple[TimedStep, ...]:
    """The schedule of `stages` over `slots` slots, as the passes plan and schedule would make it of a graph.

    `order` is that of the copies, as positions of stages; by default that in which the stages come. Each copy starts as
    early as its turn, the link and the slots allow: copy k goes into the slot that the stage frees which is the
    (k - slots)-th of those with a bank.

    Raises PlanError where no slot would ever be free for a copy, ValueError where `order` is not one of these stages.
    """
    needed = streamed_stages(stages, resident)
    order = needed if order is None else tuple(order)
    if sorted(order) != list(needed):
        raise ValueError(f"order is {list(order)}; it must name each of the streamed stages {list(needed)} once")
    if needed and slots < 1:
        raise PlanError(f"slots is {slots}; stages with banks need 1 or more")
    slot_of: dict[int, int] = {}
    after: dict[int, int] = {}
    for turn, place in enumerate(order):
        if turn < slots:
            slot_of[place] = turn
            continue
        freed_by = needed[turn - slots]
        if freed_by not in slot_of:
            raise PlanError(
                f"order {list(order)} does not go with slots={slots}: {stages[place].name} would wait for the slot of "
                f"{stages[freed_by].name}, which comes later"
            )
        slot_of[place] = slot_of[freed_by]
        after[freed_by] = place

    def step(op: str, place: int, seconds: float = 0.0) -> TimedStep:
        stage = stages[place]
        return TimedStep(op, stage.layer, seconds, slot_of[place], stage.bank_bytes, stage.link)

    steps = [step("prefetch", place, stages[place].transfer_seconds) for place in order[:slots]]
    for place, stage in enumerate(stages):
        computing = TimedStep("segment", stage.name, stage.compute_seconds)
        if place not in slot_of:
            steps.append(computing)
            continue
        steps += [step("acquire", place), computing, step("release", place)]
        if place in after:
            steps.append(step("prefetch", after[place], stages[after[place]].transfer_seconds))
    return tuple(steps)

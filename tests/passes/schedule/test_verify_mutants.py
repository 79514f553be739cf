"""Compare the verifier with a simulation: it rejects schedules that fail under some timing, and no others."""

from __future__ import annotations

import collections
import functools
import random

import pytest
import torch
from torch.fx import Graph, GraphModule

from moepass.passes.ir.plan import Plan
from moepass.passes.schedule.verify import RULES, ScheduleFacts, schedule_facts
from moepass.runtime.execute.bound_graph import bind
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.ring import make_ring
from tests.helpers.graphs.schedule_judge import wrong_because
from tests.helpers.mutants.random_cases import SEED, times
from tests.helpers.mutants.schedule_mutants import CASES, KINDS, Case, Mutation, case, correct_schedule, mutant

# Rules that concern only timing. Other rules, and the event of a refill, also concern agreement with the plan.
TIMING = {"read_after_write", "read_before_release", "write_after_read"}


def broken_rules(graph: Graph, plan: Plan) -> frozenset[str]:
    """Return all rules that reject the schedule, each checked separately."""
    facts = schedule_facts(graph, plan)
    return frozenset(name for name in RULES if _is_broken(name, facts))


def _is_broken(rule: str, facts: ScheduleFacts) -> bool:
    return next(iter(RULES[rule].check(facts)), None) is not None


def judged(base: Case, graph: Graph, plan: Plan, seed: int) -> str | None:
    return wrong_because(graph, plan, base.expected, (base.graph, base.plan), seed=seed)


class Verdicts:
    """The verdicts of simulation and verifier about many mutants."""

    def __init__(self, count: int, seed: int) -> None:
        generator = random.Random(seed)
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.missed: list[str] = []
        self.false_alarms: list[str] = []
        # Wrong mutants that only one rule rejects, which would be accepted without it.
        self.caught_by_one: collections.Counter[str] = collections.Counter()
        self.kinds: collections.Counter[str] = collections.Counter()
        for number in range(count):
            base = case(*CASES[number % len(CASES)])
            self._add(base, mutant(base, generator), number)

    def _add(self, base: Case, tried: Mutation, number: int) -> None:
        problem = judged(base, tried.graph, tried.plan, seed=number)
        broken = broken_rules(tried.graph, tried.plan)
        self.counts["wrong" if problem else "right", "rejected" if broken else "accepted"] += 1
        self.kinds.update(tried.done)
        where = f"mutant {number} of {CASES[number % len(CASES)]} by {tried.done}"
        if problem and not broken:
            self.missed.append(f"{where}: {problem}")
        if problem and len(broken) == 1:
            self.caught_by_one[next(iter(broken))] += 1
        if not problem and broken and broken <= TIMING:
            self.false_alarms.append(f"{where}: rejected by {sorted(broken)}, and no timing goes wrong")

    def check(self) -> None:
        assert not self.missed, "\n".join(self.missed)
        assert not self.false_alarms, "\n".join(self.false_alarms)


@functools.cache
def _sample() -> Verdicts:
    return Verdicts(count=times(700), seed=SEED)


@pytest.mark.slow
def test_no_wrong_mutant_is_accepted_and_no_timing_is_blamed_in_vain() -> None:
    _sample().check()


@pytest.mark.slow
def test_the_mutants_are_of_every_kind_both_right_and_wrong() -> None:
    verdicts = _sample()
    assert set(verdicts.kinds) == set(KINDS)
    assert verdicts.counts["right", "accepted"] >= 40
    assert verdicts.counts["wrong", "rejected"] >= 300


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_the_loss_of_a_rule_would_be_noticed(rule: str) -> None:
    assert _sample().caught_by_one[rule], f"no mutant is rejected by {rule} alone"


def test_no_correct_schedule_is_rejected() -> None:
    generator = random.Random(SEED)
    for number in range(times(30)):
        model, slots = CASES[number % len(CASES)]
        graph, plan = correct_schedule(model, slots, generator)
        assert judged(case(model, slots), graph, plan, seed=number) is None, "the schedule is not correct"
        assert not broken_rules(graph, plan), f"schedule {number}, of {model} with {slots} slots:\n{graph}"


# ---- Simulation and real ring ---------------------------------------------------------------------------------------


def _run_for_real(base: Case, graph: Graph, plan: Plan, link: Link, runs: int = 3) -> list[tuple[torch.Tensor, ...]]:
    """Return the outputs of several runs on a ring that poisons released slots. Errors of the runs are passed on."""
    ring = make_ring(plan.slots, plan.slot_bytes, torch.device("cpu"), link)
    ring.debug = True
    ring.reserve(plan.slots, plan.slot_bytes, plan.encoded_buffer_bytes)
    try:
        bound = bind(GraphModule(base.canonical, graph), {spec.index: spec for spec in plan.banks}, ring)
        outputs = []
        for _ in range(runs):
            with torch.no_grad(), ring.run("mutant", plan.gathers()):
                outputs.append(tuple(value.clone() for value in bound(*base.inputs)))
        return outputs
    finally:
        ring.reset()


def _goes_wrong(base: Case, tried: Mutation, expected: tuple[torch.Tensor, ...], link: Link) -> str | None:
    try:
        outputs = _run_for_real(base, tried.graph, tried.plan, link)
    except Exception as error:  # a correct schedule raises no error at all
        return f"{type(error).__name__}: {error}"
    for run, output in enumerate(outputs):
        # Outputs that an escaped slot adds are not compared.
        if not all(torch.equal(mine, theirs) for mine, theirs in zip(output, expected, strict=False)):
            return f"run {run} gives something else"
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*NoneType:SyntaxWarning")  # raised by wrong generated code
def test_errors_on_a_real_ring_are_errors_of_simulation_and_verifier() -> None:
    generator = random.Random(SEED)
    wrong: collections.Counter[bool] = collections.Counter()
    for number in range(times(100)):
        model, slots = CASES[number % len(CASES)]
        base = case(model, slots)
        expected = _run_for_real(base, base.graph, base.plan, Link())[0]
        tried = mutant(base, generator)
        # Copies that end at once, and copies that take longer than all other work.
        link = generator.choice([Link(), Link(base.plan.slot_bytes / 0.004)])
        problem = _goes_wrong(base, tried, expected, link)
        wrong[problem is not None] += 1
        if problem:
            assert judged(base, tried.graph, tried.plan, seed=number), f"{tried.done}: {problem}"
            assert broken_rules(tried.graph, tried.plan), f"{tried.done}: {problem}"
    assert wrong[True] >= 20
    assert wrong[False] >= 5

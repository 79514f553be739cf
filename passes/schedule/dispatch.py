"""Whether a run gathers weights or exchanges tokens: what the plan says about it, and the rule that a run follows.

A graph from which expert parallelism was taken has two forms: `gathered`, the schedule, and `exchanged`, the graph as
it was captured. Below a number of tokens the second is faster. An exchange needs all ranks, so they all take the same
form in the same run, whatever each of them brings: by the mean number of tokens per rank, since an exchange spreads the
work evenly and takes as long as the mean says.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from torch.fx import GraphModule, Node

from moepass.models.errors import InputError
from moepass.models.formulas.text import evaluate_text
from moepass.passes.graph.input_sizes import size_sources
from moepass.passes.graph.nodes import is_call
from moepass.passes.ir.plan import Dispatch, Plan, Refusal
from moepass.passes.ir.protocol import PassContext
from moepass.passes.ir.slot_operations import gather
from moepass.passes.parallel.match.routed_tokens import TOKENS_KEY
from moepass.passes.planner.all_to_all_crossover import CrossoverEstimate

GATHERED, EXCHANGED = "gathered", "exchanged"

# [Empirical] A guess, not measured: so much may a batch size vary around the crossover without a change of form.
HYSTERESIS = 0.1


def choose_form(tokens: float, ranks: int, crossover_tokens: int, hysteresis: float, last: str | None) -> str:
    """The form of a run with `tokens` tokens on all `ranks` together; `last` is that of the run before, if any.

    Exchanged below the crossover, gathered from it on; near it, as the last time: what changes the form is a mean
    beyond crossover_tokens · (1 ± hysteresis).
    """
    towards = {None: 0.0, GATHERED: -hysteresis, EXCHANGED: hysteresis}[last]
    return EXCHANGED if tokens < crossover_tokens * (1 + towards) * ranks else GATHERED


def plan_dispatch(module: GraphModule, plan: Plan, context: PassContext) -> tuple[Dispatch | None, tuple[Refusal, ...]]:
    """When runs of a canonical graph exchange; where that was asked for and cannot be, why.

    `plan` has the graph's blocks and costs. Raises InputError where the profile lacks a rate or a link.
    """
    if context.all_to_all_below is None and context.hardware is None:
        return None, ()
    gathers = [node for node in module.graph.nodes if is_call(node, gather)]
    problem = _problem(module, gathers)
    if problem is None and context.all_to_all_below is None and plan.cost is None:
        problem = "the graph has no costs, since pass cost is disabled"
    if problem is not None:
        asked = context.hardware.name if context.all_to_all_below is None and context.hardware else ""
        option = "hardware" if asked else "all_to_all_below"
        reason = f"{asked or context.all_to_all_below} has no effect: {problem}"
        return None, (Refusal("the graph", reason, f"option {option}"),)
    tokens = _mean_tokens(gathers)
    if context.all_to_all_below is not None:
        reason = (
            f"below {context.all_to_all_below} tokens per rank on average the graph runs as it was captured, exchanges "
            "and all, as option all_to_all_below says"
        )
        return Dispatch(context.all_to_all_below, HYSTERESIS, str(tokens), reason), ()
    return _estimated(plan, tokens, context), ()


def _estimated(plan: Plan, tokens: sympy.Expr, context: PassContext) -> Dispatch:
    """By the profile: from where on gathering takes no longer."""
    assert context.hardware is not None
    ranks = context.groups[next(bank.group for bank in plan.banks if bank.group)].ranks
    estimate = CrossoverEstimate(plan, tokens, context.hardware, ranks, context.slots, context.transport)
    crossover = estimate.crossover_tokens()
    there = estimate.seconds(crossover)
    reason = (
        f"below {crossover} tokens per rank on average the graph runs as it was captured: by profile "
        f"{context.hardware.name} a gathered run takes no less than the {there.transfer:.3g} s of its transfers, and "
        f"exchanging so many tokens takes {there.exchange:.3g} s"
    )
    return Dispatch(crossover, HYSTERESIS, str(tokens), reason, is_estimated=True)


def _problem(module: GraphModule, gathers: Sequence[Node]) -> str | None:
    """What stands against running the graph as it was captured."""
    if not gathers:
        return "no expert parallelism was taken out of it, so it has one form only"
    for node in gathers:
        name = node.meta.get("moepass_block", node.name)
        if TOKENS_KEY not in node.meta:
            return f"block {name} asks for complete experts itself, and so would run with gathered weights in any form"
        if node.meta[TOKENS_KEY] is None:
            return f"how many tokens block {name} routes cannot be told from the graph"
    known = size_sources(module.graph)
    try:
        evaluate_text(str(_mean_tokens(gathers)), dict.fromkeys(known, 2))
    except InputError as error:
        return f"its number of tokens cannot be told from its inputs ({error})"
    return None


def _mean_tokens(gathers: Sequence[Node]) -> sympy.Expr:
    """Tokens of a block, in the mean over blocks."""
    return sympy.Add(*(node.meta[TOKENS_KEY] for node in gathers)) / len(gathers)

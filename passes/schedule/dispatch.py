"""The choice between gathering weights and exchanging tokens: its record in the plan, and the rule that runs follow.

After expert parallelism was eliminated, a graph has two forms: `gathered`, the schedule, and `exchanged`, the captured
graph. Below a number of tokens, `exchanged` is faster. An exchange needs all ranks, so all ranks take the same form in
the same run. The mean number of tokens per rank decides, because an exchange spreads the work evenly over ranks.
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
from moepass.passes.parallel.match.parallel_block import ROUTED_TOKENS_KEY
from moepass.passes.planner.all_to_all_crossover import CrossoverEstimate

GATHERED, EXCHANGED = "gathered", "exchanged"

# [Empirical] A guess, not measured: the relative variation of a batch size around the crossover that changes no form.
HYSTERESIS = 0.1


def choose_form(tokens: float, ranks: int, crossover_tokens: int, hysteresis: float, last: str | None) -> str:
    """Return the form of a run with `tokens` tokens on all `ranks` together.

    A run below the crossover is exchanged, any other is gathered. Near the crossover, the form of the last run stays
    until the mean passes crossover_tokens · (1 ± hysteresis).

    Args:
        tokens: Tokens of all ranks together.
        ranks: Number of ranks.
        crossover_tokens: Runs with at least this many tokens per rank are gathered.
        hysteresis: Fraction of the crossover.
        last: Form of the last run, or None for the first run.
    """
    shift = {None: 0.0, GATHERED: -hysteresis, EXCHANGED: hysteresis}[last]
    return EXCHANGED if tokens < crossover_tokens * (1 + shift) * ranks else GATHERED


def plan_dispatch(module: GraphModule, plan: Plan, context: PassContext) -> tuple[Dispatch | None, tuple[Refusal, ...]]:
    """Return the rule that decides which runs of a canonical graph exchange tokens instead of gathering weights.

    Returns no rule if no option asks for exchanges, or, with a refusal, if the graph allows none. `plan` has the
    graph's blocks and costs. Raises InputError if the profile lacks a rate or a link.
    """
    if context.all_to_all_below is None and context.hardware is None:
        return None, ()
    gathers = [node for node in module.graph.nodes if is_call(node, gather)]
    problem = _problem(module, gathers)
    if problem is None and context.all_to_all_below is None and plan.cost is None:
        problem = "the graph has no costs, because pass cost is disabled"
    if problem is not None:
        asked = context.hardware.name if context.all_to_all_below is None and context.hardware else ""
        option = "hardware" if asked else "all_to_all_below"
        reason = f"{asked or context.all_to_all_below} has no effect: {problem}"
        return None, (Refusal("the graph", reason, f"option {option}"),)
    tokens = _mean_tokens(gathers)
    if context.all_to_all_below is not None:
        reason = (
            f"below {context.all_to_all_below} tokens per rank on average the graph runs as it was captured, with its "
            "exchanges, because of option all_to_all_below"
        )
        return Dispatch(context.all_to_all_below, HYSTERESIS, str(tokens), reason), ()
    return _estimated(plan, tokens, context), ()


def _estimated(plan: Plan, tokens: sympy.Expr, context: PassContext) -> Dispatch:
    """Estimate the crossover from the hardware profile."""
    assert context.hardware is not None
    ranks = context.groups[next(bank.group for bank in plan.banks if bank.group)].ranks
    estimate = CrossoverEstimate(plan, tokens, context.hardware, ranks, context.slots, context.transport)
    crossover = estimate.crossover_tokens()
    at_crossover = estimate.seconds(crossover)
    reason = (
        f"below {crossover} tokens per rank on average the graph runs as it was captured: by profile "
        f"{context.hardware.name} a gathered run takes at least the {at_crossover.transfer:.3g} s of its transfers, "
        f"and exchanging {crossover} tokens per rank takes {at_crossover.exchange:.3g} s"
    )
    return Dispatch(crossover, HYSTERESIS, str(tokens), reason, is_estimated=True)


def _problem(module: GraphModule, gathers: Sequence[Node]) -> str | None:
    """Return the reason why the captured graph cannot run, or None if it can."""
    if not gathers:
        return "no expert parallelism was eliminated from the graph, so it has only one form"
    for node in gathers:
        name = node.meta.get("moepass_block", node.name)
        if ROUTED_TOKENS_KEY not in node.meta:
            return f"the model itself gathers all experts of block {name}, so both forms would gather weights"
        if node.meta[ROUTED_TOKENS_KEY] is None:
            return f"the graph does not determine how many tokens block {name} routes"
    input_symbols = size_sources(module.graph)
    try:
        evaluate_text(str(_mean_tokens(gathers)), dict.fromkeys(input_symbols, 2))
    except InputError as error:
        return f"the graph's inputs do not determine its number of tokens ({error})"
    return None


def _mean_tokens(gathers: Sequence[Node]) -> sympy.Expr:
    """Return the tokens of a block, averaged over blocks."""
    return sympy.Add(*(node.meta[ROUTED_TOKENS_KEY] for node in gathers)) / len(gathers)

"""Whether a run gathers weights or exchanges tokens: what the plan says about it, and the rule that a run follows.

A graph from which expert parallelism was taken has two forms: `gathered`, the schedule, and `exchanged`, the graph as
it was captured. Below a number of tokens the second is faster. An exchange needs all ranks, so they all take the same
form in the same run, whatever each of them brings: by the mean number of tokens per rank, since an exchange spreads the
work evenly and takes as long as the mean says.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch.fx import GraphModule, Node

from moepass.models.errors import InputError
from moepass.models.formulas.text import evaluate_text
from moepass.passes.graph import fake_value, is_call
from moepass.passes.input_sizes import size_expression, size_sources
from moepass.passes.ir import Dispatch, Refusal, gather
from moepass.passes.parallel_match import ParallelBlock, ancestors
from moepass.passes.protocol import PassContext

aten = torch.ops.aten

GATHERED, EXCHANGED = "gathered", "exchanged"

# [Empirical] A guess, not measured: so much may a batch size vary around the border without a change of form.
HYSTERESIS = 0.1

# Written on the gather of a block that was localised: its tokens, or why they are unknown.
TOKENS_KEY = "moepass_tokens"
_OPTION = "option all_to_all_below"


def choose_form(tokens: float, ranks: int, border_tokens: int, hysteresis: float, last: str | None) -> str:
    """The form of a run with `tokens` tokens on all `ranks` together; `last` is that of the run before, if any.

    Exchanged below the border, gathered from it on; near it, as the last time: what changes the form is a mean beyond
    border_tokens · (1 ± hysteresis).
    """
    towards = {None: 0.0, GATHERED: -hysteresis, EXCHANGED: hysteresis}[last]
    return EXCHANGED if tokens < border_tokens * (1 + towards) * ranks else GATHERED


def routed_tokens(block: ParallelBlock) -> sympy.Expr | None:
    """How many tokens of this rank the block routes, in the graph's sizes; None where nothing in the graph says so."""
    if "ids" in block.sources:
        return size_expression(fake_value(block.sources["ids"]).shape[0])
    for node in ancestors(block.sources["counts"]):
        if is_call(node, aten.topk.default):
            *leading, top_k = (size_expression(size) for size in fake_value(node)[0].shape)
            tokens = sympy.Mul(*leading)
            rows = size_expression(fake_value(block.sources["rows"]).shape[0])
            # Rows of fixed capacity are slots, of which there may be more or fewer than tokens fill.
            is_plausible = block.form == "all_to_all_capacity" or sympy.expand(rows - tokens * top_k) == 0
            return tokens if is_plausible else None
    return None


def plan_dispatch(module: GraphModule, context: PassContext) -> tuple[Dispatch | None, tuple[Refusal, ...]]:
    """When runs of a canonical graph exchange; where that was asked for and cannot be, why."""
    border = _border(context)
    if border is None:
        return None, ()
    border_tokens, reason = border
    gathers = [node for node in module.graph.nodes if is_call(node, gather)]
    problem = _problem(module, gathers)
    if problem is not None:
        return None, (Refusal("the graph", f"{context.all_to_all_below} has no effect: {problem}", _OPTION),)
    return Dispatch(border_tokens, HYSTERESIS, str(_mean_tokens(gathers)), reason), ()


def _border(context: PassContext) -> tuple[int, str] | None:
    """Tokens per rank below which runs exchange, and why there, in one sentence; None: they never do."""
    if context.all_to_all_below is None:
        return None
    return context.all_to_all_below, (
        f"below {context.all_to_all_below} tokens per rank on average the graph runs as it was captured, exchanges and "
        "all, as option all_to_all_below says"
    )


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

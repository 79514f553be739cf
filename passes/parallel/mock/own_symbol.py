"""Give the number of a block's tokens a symbol of its own, where it is computed from the sizes of the graph.

Contract
    in    a block that is ready to run, and its data nodes
    out   the same where its tokens are as many as a symbol says, or a constant. Where they are a quotient, a remainder,
          or more than one of them (`n + (-n) % 8` for tokens that were padded), a copy of the block in which a symbol
          stands for that number, and nothing tells what it is computed from
          NotThisForm where the block also computes with that, apart from the number of its tokens

What is proved of the copy for every number of tokens is proved of the captured block, whose numbers are some of them.
Run as it was captured, a block of `n // 16` tokens would have none for every `n` that the mock runs try. And a graph
with dynamic sizes is judged as the one with static sizes, in which the same number is a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from sympy.core.function import Application
from torch.fx import Node

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, several
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.match.parallel_block import ParallelBlock, routed_tokens
from moepass.passes.parallel.mock.mock_run import SYMBOL_SIZES, MockBlock
from moepass.passes.parallel.mock.small_copy import BlockCopier, SmallCopy
from moepass.passes.parallel.mock.small_guess import Guess, SmallMock
from moepass.passes.parallel.mock.small_sizes import Scale
from moepass.passes.rows.row_layout import ratio

_AS_CAPTURED = Scale(None, {}, (1, 1), frozenset())


def with_own_symbol(mock: MockBlock, data: set[Node]) -> SmallCopy:
    """`mock` and `data`, or their copy. Raises NotThisForm."""
    tokens = _tokens(mock.block)
    return SmallCopy(mock, data) if tokens is None else _Renamer(mock, tokens).copy(data)


def _tokens(block: ParallelBlock) -> sympy.Expr | None:
    """How many tokens the rank brings, or rows where nothing says that, or slots for each expert.

    None where it is not computed before a run.
    """
    rows = fake_value(block.sources["rows" if "rows" in block.sources else "hidden"]).shape[0]
    if not isinstance(rows, torch.SymInt):  # slots
        return None
    if block.form == "all_to_all_slots":
        tokens = ratio(sympy.expand(size_expression(rows)), sympy.Integer(block.experts))
        if tokens is None:
            return None
    else:
        routed = routed_tokens(block)
        tokens = sympy.expand(size_expression(rows) if routed is None else routed)
    # How many slots there are is known where they are filled, also where the host reads what ranks agreed on.
    is_known = block.form == "all_to_all_slots" or not any(
        map(rows.node.shape_env.is_unbacked_symint, tokens.free_symbols)
    )
    return tokens if is_known and tokens.atoms(Application) else None


class _Renamer(BlockCopier):
    def __init__(self, mock: MockBlock, tokens: sympy.Expr) -> None:
        self._own = sympy.Symbol("own_tokens", integer=True, nonnegative=True)
        as_captured = SmallMock(mock, _AS_CAPTURED)
        as_captured.sizes = {**mock.sizes, self._own: SYMBOL_SIZES[0]}
        super().__init__(as_captured, Guess())
        self._block, self._result = mock.block, mock.result
        self._tokens = tokens
        # The term that is put in terms of the others: every size that is a multiple of the tokens becomes one of `own`.
        terms = tokens.as_coefficients_dict()
        self._term = min((term for term in terms if term.atoms(Application)), key=str)
        self._stands_for = (self._own - (tokens - terms[self._term] * self._term)) / terms[self._term]
        # The node that has that number, where others are computed from it.
        self._own_node: Node | None = None

    def calls(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Without those that only compute the number of tokens, or multiples of it."""
        stops = {*self._block.sources.values(), *self._block.expert_tensors}

        def is_needed(node: Node) -> bool:
            return node not in stops and self._times_tokens(node) != 1

        before = ancestors(
            self._block.sink, self._result, follow=is_needed, stop=lambda node: self._times_tokens(node) is not None
        )
        needed = set(filter(is_needed, before))
        for node in nodes:
            if node in needed and self._times_tokens(node) is None:
                self._check(node)
        return [node for node in nodes if node in needed]

    def _call(self, node: Node) -> None:
        times = self._times_tokens(node)
        if times is None:
            super()._call(node)
            return
        if self._own_node is None:
            self._own_node = self._graph.placeholder("own_tokens")
            self._own_node.meta["val"] = self._env.create_symintnode(self._copied_symbol(self._own), hint=None)
        copied = self._graph.call_function(operator.mul, (self._own_node, times))
        copied.meta = {**node.meta, "val": fake_value(self._own_node) * times}
        self._nodes[node] = copied

    def expression(self, size: torch.SymInt) -> Any:
        return sympy.expand(size.node.expr.xreplace({self._term: self._stands_for}))

    def _times_tokens(self, node: Node) -> int | None:
        """How many times the tokens the size `node` is; None for anything else."""
        value = fake_value(node)
        times = ratio(self.expression(value), self._own) if isinstance(value, torch.SymInt) else None
        return int(times) if times is not None and times.is_Integer else None

    def _check(self, node: Node) -> None:
        """Raises NotThisForm where `node`, or what it reads, has a size that the tokens do not tell."""
        for used in (node, *node.all_input_nodes):
            value = fake_value(used)
            for item in several(value):
                for size in item.shape if isinstance(item, torch.Tensor) else (item,):
                    if isinstance(size, torch.SymInt) and self._tells_apart(self.expression(size)):
                        raise NotThisForm(
                            f"{named(used)} has a size that its tokens do not tell, so it computes with a size that "
                            "they are computed from; expected all of its sizes to follow from the "
                            "number of its tokens"
                        )

    def _tells_apart(self, size: sympy.Expr) -> bool:
        is_whole = all(times.is_Integer for times in size.as_coefficients_dict().values())
        return not is_whole or bool(size.free_symbols & self._tokens.free_symbols)

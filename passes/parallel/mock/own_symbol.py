"""Replace a computed number of tokens by a symbol, which mock runs can choose.

Contract
    in    a block that is ready to run, and its data nodes
    out   the same block if its number of tokens is a symbol or constant. If it is computed by divisions, such as
          `n + (-n) % 8` for padded tokens, a copy of the block in which a new symbol replaces it
          NotThisForm if the block also computes with `n` otherwise

A proof for every value of the symbol covers all numbers of tokens of the captured block, which would have none for
`n // 16` and the small `n` of mock runs. Graphs with static sizes, where the number is a constant, have the same proof.
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
from moepass.passes.graph.nodes import fake_value, symbolic_sizes
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.match.parallel_block import ParallelBlock, routed_tokens
from moepass.passes.parallel.mock.mock_run import SYMBOL_SIZES, MockBlock
from moepass.passes.parallel.mock.small_copy import BlockCopier, SmallCopy
from moepass.passes.parallel.mock.small_guess import Guess, SmallMock
from moepass.passes.parallel.mock.small_sizes import Scale, own_rows_of
from moepass.passes.rows.row_layout import ratio


def with_own_symbol(mock: MockBlock, data: set[Node]) -> SmallCopy:
    """Return `mock` and `data`, or their copy with a symbol for a computed number of tokens. Raises NotThisForm."""
    tokens = _tokens(mock.block)
    return SmallCopy(mock, data) if tokens is None else _Renamer(mock, tokens).copy(data)


def _tokens(block: ParallelBlock) -> sympy.Expr | None:
    """Return this rank's number of tokens (else rows) or slots per expert if it is computed before a run; else None."""
    rows = own_rows_of(block)
    if not isinstance(rows, torch.SymInt):  # slots
        return None
    if block.form == "all_to_all_slots":
        tokens = ratio(sympy.expand(size_expression(rows)), sympy.Integer(block.experts))
        if tokens is None:
            return None
    else:
        routed = routed_tokens(block)
        tokens = sympy.expand(size_expression(rows) if routed is None else routed)
    # The number of slots is known when they are filled, even if ranks agree on it in a run.
    is_known = block.form == "all_to_all_slots" or not any(
        map(rows.node.shape_env.is_unbacked_symint, tokens.free_symbols)
    )
    return tokens if is_known and tokens.atoms(Application) else None


class _Renamer(BlockCopier):
    def __init__(self, mock: MockBlock, tokens: sympy.Expr) -> None:
        self._new_symbol = sympy.Symbol("own_tokens", integer=True, nonnegative=True)
        as_captured = SmallMock(mock, Scale())
        as_captured.sizes = {**mock.sizes, self._new_symbol: SYMBOL_SIZES[0]}
        super().__init__(as_captured, Guess())
        self._block, self._result = mock.block, mock.result
        self._tokens = tokens
        # `_term_value` replaces this term, which turns multiples of the tokens into multiples of the symbol.
        terms = tokens.as_coefficients_dict()
        self._term = min((term for term in terms if term.atoms(Application)), key=str)
        self._term_value = (self._new_symbol - (tokens - terms[self._term] * self._term)) / terms[self._term]
        # The node of the number of tokens, if other sizes are computed from it.
        self._token_node: Node | None = None

    def calls(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return `nodes` without those that only compute the number of tokens, or multiples of it."""
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
        if self._token_node is None:
            self._token_node = self._graph.placeholder("own_tokens")
            self._token_node.meta["val"] = self._env.create_symintnode(self._copied_symbol(self._new_symbol), hint=None)
        copied = self._graph.call_function(operator.mul, (self._token_node, times))
        copied.meta = {**node.meta, "val": fake_value(self._token_node) * times}
        self._nodes[node] = copied

    def expression(self, size: torch.SymInt) -> Any:
        return sympy.expand(size.node.expr.xreplace({self._term: self._term_value}))

    def _times_tokens(self, node: Node) -> int | None:
        """Return the quotient of the size `node` and the number of tokens, or None if it is no integer."""
        value = fake_value(node)
        times = ratio(self.expression(value), self._new_symbol) if isinstance(value, torch.SymInt) else None
        return int(times) if times is not None and times.is_Integer else None

    def _check(self, node: Node) -> None:
        """Raise NotThisForm if `node` or an input has a size that does not follow from the number of tokens."""
        for used in (node, *node.all_input_nodes):
            for size in map(self.expression, symbolic_sizes([used])):
                is_integral = all(times.is_Integer for times in size.as_coefficients_dict().values())
                if not is_integral or size.free_symbols & self._tokens.free_symbols:
                    raise NotThisForm(
                        f"{named(used)} computes with a size from which the number of tokens is computed; expected all "
                        "sizes to follow from the number of tokens"
                    )

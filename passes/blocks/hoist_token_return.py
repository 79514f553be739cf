"""Move the return of a block's rows to the order of tokens right behind its last GEMM, with the row work on the way.

Models multiply the rows of the last GEMM by routing weights, bring them back from the order of experts to that of
tokens, and add the k rows of each token. On a GPU the GEMM's own kernel does the first two: it multiplies a tile while
that is in registers, and stores each row where the order of tokens has it. The sum stays where it is. On a CPU, where
the library's GEMM stores rows itself, an experts' loop that did so would pass over all rows once more: measured with
two threads, its GEMM and the sum take at least 1.4 times as long.

    order     row i of the experts is the pair order[i] of a token and an expert
    inverse   the inverse permutation, as models write it: arange, written by `order` into empty memory. If `order`
              were no permutation, the model would read numbers of rows that nobody has written
    return    rows[inverse]

Contract
    in    a graph of blocks
    out   the same computation. On a GPU, where rows reach a return through row work that nothing else reads: behind
          the last GEMM of the block stand row work, the inverse and the return, and before the block whatever else
          these need. Other blocks stay as they are
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.blocks.detect import find_blocks
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.blocks.sink_token_gather import with_lookup
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call, positions
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ops.arguments import is_arange
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.ops.walk import ancestors

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class TokenReturn:
    """`rows[inverse]`, and the nodes that make the inverse of `order`: empty memory, arange, and their union."""

    rows: Node
    order: Node
    memory: Node
    places: Node
    inverse: Node

    @property
    def making_inverse(self) -> tuple[Node, Node, Node]:
        return self.memory, self.places, self.inverse


@graph_pass(requires={"blocks"}, provides={"early_returns"}, conflicts={"planned", "scheduled"})
def hoist_token_return(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Move the returns."""
    changed = copy_graph_module(module)
    moved = [
        match.record.name
        for match in find_blocks(changed.graph).matches
        if _hoist(with_lookup(match.gemms[0].node), match.gemms[-1].node)
    ]
    if not moved:
        return PassResult(module, plan)
    changed.recompile()
    return PassResult(changed, plan, matches=tuple(moved))


def stores_rows_in_any_order(gemm: Node) -> bool:
    """True where a kernel of ours computes `gemm`."""
    return is_grouped_gemm(gemm) and bool(fake_value(gemm).device.type == "cuda")


def token_return(node: Node) -> TokenReturn | None:
    """`node` as a return to the order of tokens; None where that is not plain from the nodes themselves."""
    if not is_call(node, aten.index.Tensor):
        return None
    rows, (inverse, *others) = cast("tuple[Node, list[Node]]", node.args)
    if others or not is_call(inverse, aten.index_put.default, aten._unsafe_index_put.default):
        return None
    memory, (order, *more), places, *accumulates = cast("tuple[Node, list[Node], Node, bool]", inverse.args)
    if more or any(accumulates) or inverse.kwargs or not has_trait(memory, Trait.EMPTY):
        return None
    values = [fake_value(one) for one in (order, memory, places)]
    is_vector = all(value.dim() == 1 and value.dtype == torch.int64 for value in values)
    # By their text: to ask a symbolic size would guard on the answer.
    sizes = {str(value.shape[0]) for value in (fake_value(rows), *values)}
    if not is_vector or len(sizes) != 1 or not is_arange(places):
        return None
    return TokenReturn(rows, order, memory, places, inverse)


def block_ends(graph: Graph) -> dict[Node, Node]:
    """For each node from a block's last GEMM on to the return that stands behind it, this return."""
    ends: dict[Node, Node] = {}
    for gemm in graph.nodes:
        if stores_rows_in_any_order(gemm) and (chain := _way_back(gemm)):
            run = [gemm]
            expected = {*_row_work_for(chain), *_return_of(chain).making_inverse}
            while run[-1].next in expected:
                run.append(run[-1].next)
            if run[-1] is chain[-1]:
                ends.update(dict.fromkeys(run, chain[-1]))
    return ends


def _way_back(gemm: Node) -> tuple[Node, ...]:
    """The row work from `gemm` to the return of its rows, and the return; empty where there is no such way."""
    chain: list[Node] = []
    node = gemm
    while len(node.users) == 1:
        (user,) = node.users
        found = token_return(user)
        if found is not None and found.rows is node:
            return (*chain, user)
        if not _is_pointwise(user) or str(fake_value(user).shape) != str(fake_value(gemm).shape):
            break
        chain.append(user)
        node = user
    return ()


def _return_of(chain: tuple[Node, ...]) -> TokenReturn:
    found = token_return(chain[-1])
    assert found is not None
    return found


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _row_work_for(chain: tuple[Node, ...]) -> set[Node]:
    """Return `chain`, and the lookups and pointwise operations that only these nodes read: a tile may compute them."""
    row_work = set(chain)

    def is_row_work(node: Node) -> bool:
        is_known = is_call(node, aten.index.Tensor, aten.unsqueeze.default) or _is_pointwise(node)
        return is_known and set(node.users) <= row_work

    for node in ancestors(*chain, follow=is_row_work):
        row_work.add(node)
    return row_work


def _hoist(begin: Node, gemm: Node) -> bool:
    """Move what is between `gemm`, a block's last, and the return of its rows; False where all stays as it is."""
    chain = _way_back(gemm) if stores_rows_in_any_order(gemm) else ()
    if not chain:
        return False
    place = positions(gemm.graph)
    back = _return_of(chain)
    row_work = _row_work_for(chain)
    behind = [used for used in (back.order, *back.places.all_input_nodes) if place[used] > place[gemm]]
    kept = {gemm, *back.making_inverse}
    needed = set(ancestors(*chain, *behind, follow=lambda used: used not in kept and place[used] > place[gemm]))
    before = sorted(needed - row_work, key=place.__getitem__)
    if any(place[used] >= place[begin] and used not in before for node in before for used in node.all_input_nodes):
        return False
    for node in before:
        begin.prepend(node)
    for node in sorted(needed & row_work, key=place.__getitem__, reverse=True):
        gemm.append(node)
    _make_inverse_here(chain[-1], back)
    return True


def _make_inverse_here(node: Node, back: TokenReturn) -> None:
    """Make the inverse for the return `node` alone, right before it: others may read arange, or an early inverse."""
    graph = node.graph
    with graph.inserting_before(node):
        memory = graph.call_function(aten.empty_like.default, (back.order,))
        memory.meta = dict(back.memory.meta)
        places, inverse = (graph.node_copy(made, lambda used: used) for made in (back.places, back.inverse))
        inverse.args = (memory, [back.order], places)
    node.args = (back.rows, [inverse])
    for old in reversed(back.making_inverse):
        if not old.users:
            graph.erase_node(old)

"""Move the return of a block's rows to the order of tokens right after its last GEMM, with the row work between them.

Models multiply the rows of the last GEMM by routing weights, restore the order of tokens, and sum the k rows of each
token. On a GPU, the kernel of the GEMM does the first two: it multiplies a tile in registers, and stores each row at
its index in the order of tokens. The sum stays separate. On a CPU, the GEMM of the library stores its rows in order, so
another loop would have to reorder them: with two threads, the GEMM and the sum take at least 1.4 times as long.

    order     row i of the experts is the pair order[i] of a token and an expert
    inverse   the inverse permutation: an arange, written to empty memory at indices `order`. This must be a
              permutation, or the model would read uninitialised indices
    return    rows[inverse]

Contract
    in    a graph of blocks
    out   the same computation. On a GPU, if only row work is between the last GEMM of a block and the return: after the
          GEMM follow row work, the inverse and the return; other nodes that these need are before the block. Other
          blocks stay unchanged
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch.fx import Graph, GraphModule, Node

from moepass.passes.blocks.detect import blocks_in
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.blocks.sink_token_gather import first_expert_node
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call, positions
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ops.arguments import is_arange
from moepass.passes.ops.traits import Trait, has_trait, is_pointwise
from moepass.passes.ops.walk import ancestors

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class TokenReturn:
    """The operands of `rows[inverse]`, and the nodes of the inverse: empty memory, `order`, and an arange `numbers`."""

    rows: Node
    order: Node
    memory: Node
    numbers: Node
    inverse: Node

    @property
    def inverse_nodes(self) -> tuple[Node, Node, Node]:
        return self.memory, self.numbers, self.inverse


@graph_pass(requires={"blocks"}, provides={"early_returns"}, conflicts={"planned", "scheduled"})
def hoist_token_return(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Move returns of rows to the last GEMM of their block."""
    changed = copy_graph_module(module)
    moved = [
        block.name
        for block, gemms in blocks_in(changed.graph, plan.blocks)
        if _hoist(first_expert_node(gemms[0]), gemms[-1])
    ]
    if not moved:
        return PassResult(module, plan)
    changed.recompile()
    return PassResult(changed, plan, matches=tuple(moved))


def stores_rows_in_any_order(gemm: Node) -> bool:
    """Return whether a kernel of moepass computes `gemm`, which can store rows in any order."""
    return is_grouped_gemm(gemm) and bool(fake_value(gemm).device.type == "cuda")


def token_return(node: Node) -> TokenReturn | None:
    """Return `node` as a return to the order of tokens, or None."""
    if not is_call(node, aten.index.Tensor):
        return None
    rows, (inverse, *more_indices) = cast("tuple[Node, list[Node]]", node.args)
    if more_indices or not is_call(inverse, aten.index_put.default, aten._unsafe_index_put.default):
        return None
    memory, (order, *more_orders), numbers, *accumulates = cast("tuple[Node, list[Node], Node, bool]", inverse.args)
    if more_orders or any(accumulates) or inverse.kwargs or not has_trait(memory, Trait.EMPTY):
        return None
    values = [fake_value(vector) for vector in (order, memory, numbers)]
    is_vector = all(value.dim() == 1 and value.dtype == torch.int64 for value in values)
    # The sizes are compared as text, because a comparison of symbolic sizes would add a guard.
    sizes = {str(value.shape[0]) for value in (fake_value(rows), *values)}
    if not is_vector or len(sizes) != 1 or not is_arange(numbers):
        return None
    return TokenReturn(rows, order, memory, numbers, inverse)


def block_ends(graph: Graph) -> dict[Node, Node]:
    """Return the return of a block's rows by node, for adjacent nodes from its last GEMM to this return."""
    ends: dict[Node, Node] = {}
    for gemm in graph.nodes:
        if stores_rows_in_any_order(gemm) and (chain := _path_to_return(gemm)):
            run = [gemm]
            expected = {*_row_work_for(chain), *_return_of(chain).inverse_nodes}
            while run[-1].next in expected:
                run.append(run[-1].next)
            if run[-1] is chain[-1]:
                ends.update(dict.fromkeys(run, chain[-1]))
    return ends


def _path_to_return(gemm: Node) -> tuple[Node, ...]:
    """Return the row work from `gemm` to the return of its rows, and the return; empty if there is no return."""
    chain: list[Node] = []
    node = gemm
    while len(node.users) == 1:
        (user,) = node.users
        returned = token_return(user)
        if returned is not None and returned.rows is node:
            return (*chain, user)
        if not is_pointwise(user) or str(fake_value(user).shape) != str(fake_value(gemm).shape):
            break
        chain.append(user)
        node = user
    return ()


def _return_of(chain: tuple[Node, ...]) -> TokenReturn:
    returned = token_return(chain[-1])
    assert returned is not None
    return returned


def _row_work_for(chain: tuple[Node, ...]) -> set[Node]:
    """Return `chain`, and lookups and pointwise operations that only row work reads: a tile may compute them."""
    row_work = set(chain)

    def is_row_work(node: Node) -> bool:
        is_known = is_call(node, aten.index.Tensor, aten.unsqueeze.default) or is_pointwise(node)
        return is_known and set(node.users) <= row_work

    for node in ancestors(*chain, follow=is_row_work):
        row_work.add(node)
    return row_work


def _hoist(begin: Node, gemm: Node) -> bool:
    """Move the return of the rows of `gemm`, the last of a block that starts at `begin`; return whether it moved."""
    chain = _path_to_return(gemm) if stores_rows_in_any_order(gemm) else ()
    if not chain:
        return False
    index = positions(gemm.graph)
    back = _return_of(chain)
    row_work = _row_work_for(chain)
    later = [used for used in (back.order, *back.numbers.all_input_nodes) if index[used] > index[gemm]]
    excluded = {gemm, *back.inverse_nodes}
    needed = set(ancestors(*chain, *later, follow=lambda used: used not in excluded and index[used] > index[gemm]))
    before = sorted(needed - row_work, key=index.__getitem__)
    if any(index[used] >= index[begin] and used not in before for node in before for used in node.all_input_nodes):
        return False
    for node in before:
        begin.prepend(node)
    for node in sorted(needed & row_work, key=index.__getitem__, reverse=True):
        gemm.append(node)
    _compute_inverse_before(chain[-1], back)
    return True


def _compute_inverse_before(node: Node, back: TokenReturn) -> None:
    """Compute the inverse right before the return `node`, which gets its own copy of the arange and the inverse."""
    graph = node.graph
    with graph.inserting_before(node):
        memory = graph.call_function(aten.empty_like.default, (back.order,))
        memory.meta = dict(back.memory.meta)
        numbers, inverse = (graph.node_copy(original, lambda used: used) for original in (back.numbers, back.inverse))
        inverse.args = (memory, [back.order], numbers)
    node.args = (back.rows, [inverse])
    for old in reversed(back.inverse_nodes):
        if not old.users:
            graph.erase_node(old)

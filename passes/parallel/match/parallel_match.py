"""Find blocks of expert parallelism: local expert products between the collectives that bring tokens and take results.

Contract
    in    a functional ATen inference graph; the process groups that it talks to, as (rank, ranks) by name
    out   typed records that hold both ends of a block; a refusal for every block of products that stands between
          collectives and fits none of the forms. Nothing is edited.

Pseudo-code
    for each block of local expert products with something near it (`find_parallel.py`):
        an AllToAll: the AllToAll of rows before it, the exchange of counts beside that, and everything in between
        an AllReduce or a ReduceScatter: the tokens, their expert ids and their weights before it

What is found here is a guess about meaning: `peer_equivalence.py` runs the block against mock peers, and the guess is
taken only if it gives the same results.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from moepass.models.formulas.expert_placement import shard_bounds
from moepass.passes.blocks.detect import BlockMatch, ExpertProduct
from moepass.passes.graph.collectives import Collective, Communication, collective_of
from moepass.passes.graph.nodes import fake_value, is_call, is_view, view_source
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import describe_shape, named
from moepass.passes.ir.protocol import CaptureNotes, Group
from moepass.passes.parallel.match.near_experts import MOST_NODES, is_size, most_nodes

aten, prims = torch.ops.aten, torch.ops.prims


@dataclasses.dataclass(frozen=True)
class ParallelBlock:
    """A block of expert parallelism.

    `sources` are the values that the local form of the block starts from, by role:
        all_to_all, all_to_all_capacity   `rows`, sorted by expert, and `counts`, rows by expert over all ranks
        all_gather, all_reduce            `hidden`, `ids`, `weights`
    `sink` is the value that the local form gives. `region` is what lies between, in host order.
    `expert_tensors` are this rank's: the weights of the products, then their biases.
    `bounds` says which experts each rank holds.
    """

    form: str
    name: str
    group_name: str
    group: Group
    bounds: tuple[int, ...]
    products: tuple[ExpertProduct, ...]
    expert_tensors: tuple[Node, ...]
    sources: Mapping[str, Node]
    sink: Node
    exchanges: tuple[Collective, ...]
    region: tuple[Node, ...]

    @property
    def experts(self) -> int:
        """Over all ranks."""
        return self.bounds[-1]

    @property
    def own_experts(self) -> range:
        return range(self.bounds[self.group.rank], self.bounds[self.group.rank + 1])

    @property
    def down(self) -> ExpertProduct:
        return self.products[-1]


def match_block(
    match: BlockMatch,
    after: Communication | None,
    arriving: Sequence[Communication],
    groups: Mapping[str, Group],
    place: dict[Node, int],
    capture: CaptureNotes,
) -> ParallelBlock:
    if after is None:
        one = arriving[0]
        raise NotThisForm(
            f"its rows or counts come by {one.kind} {named(one.node)}, but nothing in this graph takes its results "
            f"back to the ranks of their tokens; {capture.advice()}"
        )
    combine = collective_of(after.node)
    if combine is None:
        raise NotThisForm(
            f"its results go into {after.kind} {named(after.node)}, which moepass cannot take out; it knows the "
            "functional collectives all_to_all_single, all_reduce and reduce_scatter_tensor of "
            "torch.distributed._functional_collectives"
        )
    if combine.group_name not in groups:
        raise NotThisForm(
            f"process group {combine.group_name!r} of {combine.kind} is none that this process has created; create it "
            "with torch.distributed before the model is compiled"
        )
    if match.record.form != "grouped_mm":
        raise NotThisForm(
            f"its products are {match.record.form}, and expert parallelism is taken out of grouped products only; "
            "write them with torch.nn.functional.grouped_mm (transformers: experts_implementation='grouped_mm')"
        )
    for product in match.products:
        if product.weights.op != "placeholder":
            raise NotThisForm(
                f"the expert weights of {named(product.node)} are not a parameter as it is, but come from "
                f"{named(product.weights)}; keep parameters in the type and layout in which the products read them"
            )
    group = groups[combine.group_name]
    if combine.kind == "all_to_all":
        return _match_all_to_all(match, combine, group, place, capture)
    if combine.kind in ("all_reduce", "reduce_scatter"):
        return _match_partial_sums(match, combine, group, place)
    raise NotThisForm(
        f"its results go into {combine.kind} {named(combine.node)}; expected all_to_all, or a sum by all_reduce or "
        "reduce_scatter"
    )


@dataclasses.dataclass(frozen=True)
class Bias:
    """`sum` adds to each output of a product the row of `tensor` that an index says."""

    sum: Node
    tensor: Node


def bias_after(product: Node) -> Bias | None:
    """What is added right after `product`, if that is looked up row by row in an input of the graph."""
    for user in product.users:
        if is_call(user, aten.add.Tensor):
            for other in user.args:
                if is_call(other, aten.index.Tensor, aten.index_select.default):
                    tensor = view_source(other.args[0])  # type: ignore[union-attr, arg-type]
                    if tensor.op == "placeholder":
                        return Bias(user, tensor)
    return None


def _expert_tensors(match: BlockMatch, sources: set[Node]) -> tuple[Node, ...]:
    """The weights of the products, and their biases: what is there once for each expert of this rank.

    Told by what reads them. Activations of as many tokens as this rank has experts have the same shape.
    """
    found = dict.fromkeys(product.weights for product in match.products)
    for product in match.products:
        bias = bias_after(product.node)
        if bias is None or bias.tensor in sources:
            continue
        value = fake_value(bias.tensor)
        if value.is_floating_point() and value.dim() >= 2 and is_size(value.shape[0], match.record.experts):
            found.setdefault(bias.tensor)
    return tuple(found)


# ---------------------------------------------------------------------------------------------- AllToAll there and back


def _match_all_to_all(
    match: BlockMatch, combine: Collective, group: Group, place: dict[Node, int], capture: CaptureNotes
) -> ParallelBlock:
    region, exchanges, leaves = _walk_back(
        combine.result,
        place,
        most_nodes(group.ranks),
        stop_at_inputs_of=lambda found: (
            found.kind == "all_to_all" and found.group_name == combine.group_name and found != combine
        ),
    )
    exchanges.remove(combine)
    dispatches = [exchange for exchange in exchanges if exchange.is_float]
    counts = [exchange for exchange in exchanges if not exchange.is_float]
    if len(dispatches) != 1 or len(counts) != 1:
        raise NotThisForm(_other_exchanges(dispatches, counts, capture))
    (dispatch,), (count,) = dispatches, counts
    rows, counted = dispatch.input, _reshaped(count.input)
    if fake_value(rows).dim() != 2 or not is_size(fake_value(rows).shape[1], match.record.hidden):
        raise NotThisForm(
            f"the AllToAll before its products, {named(dispatch.node)}, carries {describe_shape(fake_value(rows))}; "
            f"expected rows of tokens [., {match.record.hidden}]"
        )
    bounds = _bounds_from_counts(count, group, match.record.experts)
    if dispatch.send != combine.receive or dispatch.receive != combine.send:
        raise NotThisForm(
            f"the AllToAll after its products, {named(combine.node)}, is not the reverse of {named(dispatch.node)} "
            "before them; expected the input_split_sizes of each as the output_split_sizes of the other"
        )
    # Without tokens what a rank sends is constant too: nothing.
    static = all(isinstance(size, int) for size in (*dispatch.send, *dispatch.receive))
    tensors = _expert_tensors(match, {rows, counted})
    _check_leaves(leaves - {rows, counted, *tensors}, place)
    return ParallelBlock(
        "all_to_all_capacity" if static else "all_to_all",
        match.record.name,
        combine.group_name,
        group,
        bounds,
        match.products,
        tensors,
        {"rows": rows, "counts": counted},
        combine.result,
        (count, dispatch, combine),
        tuple(region),
    )


def _other_exchanges(dispatches: list[Collective], counts: list[Collective], capture: CaptureNotes) -> str:
    found = ", ".join(
        f"{what} {named(one.node)}" for what, of in (("rows", dispatches), ("counts", counts)) for one in of
    )
    text = (
        f"{len(dispatches)} exchanges of rows and {len(counts)} exchanges of counts stand before its products"
        f"{': ' * bool(found)}{found}; expected one of each"
    )
    if not dispatches or not counts:
        return f"{text}; {capture.advice()}"
    return f"{text}: let what travels with a row, as its weight, be applied on the rank that the token came from"


def _bounds_from_counts(count: Collective, group: Group, own: int) -> tuple[int, ...]:
    """Which experts each rank holds, from how the counts are sent: as many counts to a rank as it has experts."""
    value = fake_value(count.input)
    if len(count.send) != group.ranks or not all(isinstance(size, int) for size in (*count.send, *count.receive)):
        raise NotThisForm(
            f"counts are exchanged by {named(count.node)} in {len(count.send)} parts whose sizes are not all "
            f"constants; expected one constant size for each of {group.ranks} ranks: the number of its experts"
        )
    if not all(isinstance(size, int) for size in value.shape):
        raise NotThisForm(
            f"how many counts {named(count.node)} exchanges is not a constant; expected one for each expert (as "
            "torch.histc, one_hot or scatter_add count them; torch.bincount has a length that only a run tells)"
        )
    per_entry = value.numel() // max(1, int(value.shape[0]))
    bounds = [0]
    for size in count.send:
        assert isinstance(size, int)
        bounds.append(bounds[-1] + size * per_entry)
    if bounds[-1] != value.numel():
        raise NotThisForm(
            f"{named(count.node)} exchanges {value.numel()} counts in parts of {list(count.send)}, which do not add up"
        )
    if bounds[group.rank + 1] - bounds[group.rank] != own:
        raise NotThisForm(
            f"this rank holds {own} experts, but {named(count.node)} brings it the counts of "
            f"{bounds[group.rank + 1] - bounds[group.rank]}"
        )
    return tuple(bounds)


def check_bounds(bounds: tuple[int, ...]) -> None:
    """Every rank must come to the same decision, and one without experts does not see what experts compute."""
    for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            raise NotThisForm(
                f"rank {rank} holds none of its {bounds[-1]} experts, so it cannot see what they do; spread them over "
                f"at most {bounds[-1]} ranks"
            )


# --------------------------------------------------------------------- partial sums: AllReduce, AllGather/ReduceScatter


def _match_partial_sums(match: BlockMatch, combine: Collective, group: Group, place: dict[Node, int]) -> ParallelBlock:
    if combine.reduction != "sum":
        raise NotThisForm(f"{named(combine.node)} combines its results by {combine.reduction!r}; expected a sum")
    gathered = combine.kind == "reduce_scatter"
    sources = {
        "hidden": origin(match.products[0].activations, _is_row_move, gathered),
        "ids": origin(sort_key(match), is_id_arithmetic, gathered),
        "weights": origin(_row_weights(match), _is_row_move, gathered),
    }
    _check_router(sources, place)
    tokens = fake_value(sources["hidden"])
    for role in ("ids", "weights"):
        value = fake_value(sources[role])
        if value.dim() != 2 or str(value.shape[0]) != str(tokens.shape[0]) or not isinstance(value.shape[1], int):
            raise NotThisForm(
                f"its expert {role} were looked for at {named(sources[role])}, which is {describe_shape(value)}; "
                f"expected [tokens, k] for the tokens {describe_shape(tokens)} at {named(sources['hidden'])}"
            )
    if fake_value(sources["ids"]).shape[1] != fake_value(sources["weights"]).shape[1]:
        raise NotThisForm(
            f"its expert ids {named(sources['ids'])} are {describe_shape(fake_value(sources['ids']))}, its weights "
            f"{named(sources['weights'])} {describe_shape(fake_value(sources['weights']))}; expected one shape "
            "[tokens, k]"
        )
    sink = _own_part(combine.result, tokens.shape[0]) if gathered else combine.result
    region, exchanges, leaves = _walk_back(sink, place, most_nodes(group.ranks), stop_at=frozenset(sources.values()))
    stray = [exchange.kind for exchange in exchanges if exchange.group_name != combine.group_name]
    kinds = sorted({exchange.kind for exchange in exchanges})
    # Ranks that always bring equally many tokens need no agreement (the AllReduce) on the largest number.
    known = [["all_gather", "reduce_scatter"], ["all_gather", "all_reduce", "reduce_scatter"]]
    if stray or kinds not in (known if gathered else [["all_reduce"]]):
        listed = ", ".join(f"{exchange.kind} {named(exchange.node)}" for exchange in exchanges)
        wanted = "all_gather, reduce_scatter and at most all_reduce of the largest number" if gathered else "all_reduce"
        raise NotThisForm(f"it exchanges by {listed}; expected {wanted} alone, all over one process group")
    tensors = _expert_tensors(match, set(sources.values()))
    _check_leaves(leaves - {*sources.values(), *tensors}, place)
    bounds = _bounds_from_router(sources["ids"], group, match.record.experts)
    return ParallelBlock(
        "all_gather" if gathered else "all_reduce",
        match.record.name,
        combine.group_name,
        group,
        bounds,
        match.products,
        tensors,
        sources,
        sink,
        tuple(exchanges),
        tuple(region),
    )


def _check_router(sources: Mapping[str, Node], place: dict[Node, int]) -> None:
    """Tokens and weights may be looked up by expert ids, and not depend on them in any other way.

    A mask may be that of this rank's experts alone, and in front of the block no mock run sees it.
    """
    ids = sources["ids"]
    while is_call(ids, aten.clone.default, aten._to_copy.default) or (
        is_view(ids) and not is_call(ids, operator.getitem)
    ):
        ids = ids.all_input_nodes[0]
    wanted = [sources["hidden"], sources["weights"]]
    before = {node for source in wanted for node in ancestors(source, beyond=place[ids], place=place)}
    pending, seen = [ids], {ids}
    while pending:
        for user in pending.pop().users:
            if user in seen or user not in before:
                continue
            seen.add(user)
            value = fake_value(user)
            if is_call(user, aten.gather.default, aten.index.Tensor, aten.scatter.src) and value.is_floating_point():
                continue
            if not is_view(user) and not is_call(user, aten.clone.default, aten._to_copy.default):
                raise NotThisForm(
                    f"its tokens or weights depend on its expert ids by {named(user)}, perhaps on this rank only; "
                    "expected them as the router gave them, with masks for this rank's experts behind its products"
                )
            pending.append(user)


def _bounds_from_router(ids: Node, group: Group, own: int) -> tuple[int, ...]:
    """Which experts each rank holds: contiguous shards of all the experts that the router chooses from."""
    scores = ids.args[0] if is_call(ids, operator.getitem) else None
    experts = own * group.ranks
    if is_call(scores, aten.topk.default):
        experts = int(fake_value(scores.args[0]).shape[-1])  # type: ignore[union-attr, arg-type]
    bounds = shard_bounds(experts, group.ranks)
    expected = bounds[group.rank + 1] - bounds[group.rank]
    if own != expected:
        raise NotThisForm(
            f"rank {group.rank} of {group.ranks} holds {own} of {experts} experts; expected {expected}, an even share "
            "in the order of ranks"
        )
    return bounds


def origin(node: Node, passes_through: Callable[[Node], Node | None], gathered: bool) -> Node:
    """Where a value comes from, before it was moved, masked, padded and gathered for this block.

    A block takes rows [tokens, .]; the model may have brought them into that form right in front of it.
    """
    rows = node
    while True:
        if fake_value(node).dim() == 2:
            rows = node
        if gathered and (collective := _waited_for(node)) is not None and collective.kind == "all_gather":
            node = collective.input
            if is_call(node, aten.constant_pad_nd.default):
                node = node.all_input_nodes[0]
            continue
        source = passes_through(node)
        if source is None:
            return rows
        node = source


def _waited_for(node: Node) -> Collective | None:
    while str(node.target) == "_c10d_functional.wait_tensor.default":
        node = node.all_input_nodes[0]
    return collective_of(node)


def _is_row_move(node: Node) -> Node | None:
    """The value whose rows `node` selects, masks or views."""
    if is_call(node, aten.index.Tensor, aten.index_select.default, aten.masked_fill.Scalar):
        return _node(node.args[0])
    if is_call(node, aten.where.self) and _is_scalar_constant(node.args[1]):
        return _node(node.args[2])
    if is_call(node, aten.clone.default) or (is_view(node) and not is_call(node, operator.getitem)):
        return _node(node.args[0])
    return None


def is_id_arithmetic(node: Node) -> Node | None:
    """The ids that `node` shifts, wraps, masks or views, to turn global ids into this rank's."""
    value = fake_value(node)
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return None
    if is_call(node, aten.where.self):
        candidates = [argument for argument in node.args[1:] if not _is_scalar_constant(argument)]
        return _node(candidates[0]) if len(candidates) == 1 else None
    arithmetic = (
        aten.sub.Tensor, aten.add.Tensor, aten.sub.Scalar, aten.add.Scalar, aten.remainder.Scalar,
        aten.masked_fill.Scalar, aten.clamp.default, aten.clone.default, aten._to_copy.default, aten.view.default,
        aten.reshape.default, aten._unsafe_view.default,
    )  # fmt: skip
    return _node(node.args[0]) if is_call(node, *arithmetic) else None


def _is_scalar_constant(argument: object) -> bool:
    return is_call(argument, aten.scalar_tensor.default, aten.full.default) or isinstance(argument, (int, float))


def _node(argument: object) -> Node | None:
    return argument if isinstance(argument, Node) else None


def sort_key(match: BlockMatch) -> Node:
    """What the rows were sorted by: the ids behind the places of the rows, or behind the offsets of the products."""
    first = match.products[0]
    for start in (*_row_places(first.activations), first.key):
        for node in _places_before(start):
            if is_call(node, aten.sort.stable, aten.sort.default, aten.argsort.default):
                key = node.args[0]
                assert isinstance(key, Node)
                return key
    raise NotThisForm(
        f"the rows of {named(first.node)} are not sorted by expert; expected torch.sort or argsort of expert ids "
        "before its lookup of rows"
    )


def _row_places(rows: Node) -> Iterator[Node]:
    """The places at which the rows of a block were looked up, those of the last lookup first."""
    node: Node | None = rows
    while node is not None:
        if is_call(node, aten.index.Tensor, aten.index_select.default):
            yield from (used for used in node.all_input_nodes[1:] if not fake_value(used).is_floating_point())
        node = _is_row_move(node)


def _places_before(start: Node) -> Iterator[Node]:
    """What places or counts are computed from, nearest first: not beyond the scores that a router chose ids by.

    Behind those lies the rest of the model, and in it the blocks before this one.
    """
    pending, seen = [start], {start}
    while pending and len(seen) < MOST_NODES:
        node = pending.pop(0)
        is_sort = is_call(node, aten.sort.stable, aten.sort.default, aten.argsort.default)
        if is_sort and _is_float(node.args[0]):
            continue
        yield node
        for used in node.all_input_nodes:
            # Counts may be floating numbers (histc); they were cast from ids.
            is_cast = is_call(used, aten._to_copy.default, prims.convert_element_type.default)
            if used not in seen and (not _is_float(used) or is_cast or is_call(used, aten.histc.default)):
                seen.add(used)
                pending.append(used)


def _is_float(node: object) -> bool:
    value = fake_value(node) if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _row_weights(match: BlockMatch) -> Node:
    """What the expert outputs are multiplied by, row by row."""
    pending, seen = deque([match.products[-1].node]), set[Node]()
    while pending and len(seen) < MOST_NODES:
        node = pending.popleft()
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            if is_call(user, aten.mul.Tensor):
                others = [argument for argument in user.args if argument is not node]
                if len(others) == 1 and isinstance(others[0], Node) and is_size(fake_value(others[0]).shape[-1], 1):
                    return others[0]
            pending.append(user)
    raise NotThisForm(
        f"the results of {named(match.products[-1].node)} are not multiplied by weights [., 1] of their rows before "
        "they are added up"
    )


def _own_part(result: Node, tokens: Any) -> Node:
    """The rows of this rank: behind the slice that takes the padding off, if there is one."""
    if str(fake_value(result).shape[0]) == str(tokens):
        return result
    if len(result.users) == 1:
        (user,) = result.users
        if is_call(user, aten.slice.Tensor) and str(fake_value(user).shape[0]) == str(tokens):
            return user
    raise NotThisForm(
        f"the rows that ReduceScatter gives back, {named(result)}, are {describe_shape(fake_value(result))}; expected "
        "them to be this rank's tokens, or to be cut to their number by a slice"
    )


# ------------------------------------------------------------------------------------------------------------- walking


def _walk_back(
    root: Node,
    place: dict[Node, int],
    most: int,
    *,
    stop_at_inputs_of: Callable[[Collective], bool] = lambda found: False,
    stop_at: frozenset[Node] = frozenset(),
) -> tuple[list[Node], list[Collective], set[Node]]:
    """Everything that `root` is computed from: nodes in host order, the collectives among them, and where it begins.

    Does not go beyond `stop_at`, inputs of the graph, constants, and the inputs of collectives that
    `stop_at_inputs_of` names (their split sizes are followed).
    """
    leaves: set[Node] = set()
    stops = set(stop_at)
    heap = [(-place[root], root)]
    queued = {root}
    region: list[Node] = []
    exchanges: list[Collective] = []
    while heap:
        _, node = heapq.heappop(heap)
        if node in stops or node.op in ("placeholder", "get_attr"):
            leaves.add(node)
            continue
        region.append(node)
        if len(region) > most:
            raise NotThisForm(
                f"what {named(root)} is computed from cannot be told apart from the rest of the model: more than "
                f"{most} operations lead to it without an exchange"
            )
        inputs = list(node.all_input_nodes)
        collective = collective_of(node)
        if collective is not None:
            exchanges.append(collective)
            if stop_at_inputs_of(collective):
                stops.add(collective.input if collective.is_float else _reshaped(collective.input))
        for used in inputs:
            if used not in queued:
                queued.add(used)
                heapq.heappush(heap, (-place[used], used))
    region.reverse()
    exchanges.reverse()
    return region, exchanges, leaves


_SAME_ORDER = (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim)


def _reshaped(counts: Node) -> Node:
    """The counts before they were seen in another shape: a rank may read its own sizes from there."""
    while is_call(counts, *_SAME_ORDER):
        counts = counts.all_input_nodes[0]
    return counts


def _check_leaves(leaves: set[Node], place: dict[Node, int]) -> None:
    """Beside its sources and expert tensors a block may begin with sizes and constants: what is known here."""
    for leaf in sorted(leaves, key=place.__getitem__):
        if leaf.op != "get_attr" and isinstance(fake_value(leaf), torch.Tensor):
            raise NotThisForm(
                f"it depends on {named(leaf)}, whose values are not known when the graph is compiled; expected its "
                "rows and counts, its router and the parameters of its products alone, and constants for everything "
                "else"
            )


def ancestors(node: Node, beyond: int = -1, place: dict[Node, int] | None = None) -> Iterable[Node]:
    """Nearest first, and no more than MOST_NODES; all that stand behind place `beyond` where `place` is given."""
    pending, seen = deque([node]), {node}
    while pending and (place is not None or len(seen) < MOST_NODES):
        current = pending.popleft()
        yield current
        for used in current.all_input_nodes:
            if used not in seen and (place is None or place[used] > beyond):
                seen.add(used)
                pending.append(used)

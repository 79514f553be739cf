"""Prove that the local form of a parallel block computes what the block computes, by running both with mock peers.

The block's nodes are run one by one on real numbers, with every collective answered by a mock of the other ranks. What
the mock answers follows the contract of the block's form, and what the block gives it must follow the contract too:

    all_to_all      a rank is sent, rank by rank, rows sorted by expert and how many there are of each expert; it sends
                    back each row's output in the same place
    partial sums    a rank adds up, for every token of every rank, what its own experts contribute

Each rank proves its own graph, with its own constants, so together they prove the whole exchange.

Two things make a run cheap and sharp. Expert products are not computed: a product gives, for each row, a number that
depends on the row, on the expert and on the product, so that a row that meets the wrong expert shows. Rows beyond the
last offset, and memory that nobody wrote, give NaN. And everything runs in float64, where equal means equal to 1e-9,
whatever types the graph computes in.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import Node
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from moepass.passes.collectives import WAIT, Collective, collective_of
from moepass.passes.data_flow import data_nodes
from moepass.passes.graph import constant_of, fake_value, is_call, map_nodes
from moepass.passes.index_ranges import IndexRanges
from moepass.passes.local_experts import LocalForm
from moepass.passes.parallel_match import NotThisForm, ParallelBlock
from moepass.passes.refusals import why_it_stopped
from moepass.passes.tried_values import UNWRITTEN

aten = torch.ops.aten

TOLERANCE = 1e-9
# Sizes for the symbols of a graph: distinct, so that one does not pass for another.
SYMBOL_SIZES = (6, 11, 17, 23, 29, 37, 41, 47)
# A loaded peer brings at most so many rows, or as many as this rank.
MOST_ROWS = 2048
# The first peer may bring more than so many times what this rank does.
MOST_RATIO = 4
# [Empirical] A run of a few rows takes milliseconds.
MOST_RUNS = 256
_EMPTY = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.empty_permuted.default,
    aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip


class ContractBroken(Exception):  # noqa: N818  becomes the reason of a refusal
    """The block does not do what a block of its form does."""


Draw = Callable[[torch.Generator, int, int], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """How tokens are routed in one run.

    `own` and `peers` draw the experts of n pairs of a token and an expert. A peer brings `peer_pairs` of them;
    the first one `load` times as many as this rank where that is not 0, and all bring as many as fit where slots are
    `full`.
    """

    name: str
    own: Draw
    peers: Draw
    peer_pairs: int
    load: int = 0
    full: bool = False


def _anywhere(generator: torch.Generator, pairs: int, experts: int) -> torch.Tensor:
    return torch.randint(0, experts, (pairs,), generator=generator)


def _all_to_one(generator: torch.Generator, pairs: int, experts: int) -> torch.Tensor:
    return torch.randint(0, experts, (1,), generator=generator).expand(pairs)


def _each_in_turn(generator: torch.Generator, pairs: int, experts: int) -> torch.Tensor:
    return (torch.arange(pairs) % experts)[torch.randperm(pairs, generator=generator)]


def _with(ids: Sequence[int]) -> Draw:
    """Experts anywhere, each of `ids` among them where there are pairs enough."""

    def draw(generator: torch.Generator, pairs: int, experts: int) -> torch.Tensor:
        drawn = _anywhere(generator, pairs, experts)
        drawn[: len(ids)] = torch.tensor(ids, dtype=drawn.dtype)[:pairs]
        return drawn[torch.randperm(pairs, generator=generator)]

    return draw


SCENARIOS = (
    Scenario("tokens anywhere", _anywhere, _anywhere, 13),
    Scenario("all tokens to one expert", _all_to_one, _all_to_one, 7),
    Scenario("peers without tokens", _anywhere, _anywhere, 0),
    Scenario("a peer with many tokens", _anywhere, _all_to_one, 2, load=MOST_RATIO + 1),
    Scenario("tokens for every expert", _each_in_turn, _each_in_turn, 0, full=True),
)


def check_local_form(block: ParallelBlock, local: LocalForm, result: Node) -> None:
    """Raises ContractBroken or NotThisForm where `result`, the local form that was written, is not what the block
    computes, and where that cannot be told for every number and every size."""
    with unset_fake_temporarily():  # constants of the graph are real
        ranges = IndexRanges(block, data_nodes(block, local))
    for seed, scenario in enumerate((*SCENARIOS, *_with_every_id(block))):
        # The compiler runs in fake mode; these numbers are real.
        with unset_fake_temporarily(), torch.no_grad():
            _check_scenario(_Run(block, local, torch.Generator().manual_seed(seed), scenario, ranges), result)
    ranges.check()


def _with_every_id(block: ParallelBlock) -> Iterator[Scenario]:
    """Runs in which every expert is chosen, or as many experts as `MOST_RUNS` take."""
    if "ids" not in block.sources:
        return
    ids, sizes = range(block.experts), _symbol_sizes(block)
    pairs = max(1, math.prod(_concrete(size, sizes) for size in fake_value(block.sources["ids"]).shape))
    for start in range(0, min(len(ids), MOST_RUNS * pairs), pairs):
        yield Scenario("tokens for experts one by one", _with(ids[start : start + pairs]), _anywhere, 0)


def _check_scenario(run: _Run, result: Node) -> None:
    scenario = run.scenario
    try:
        if run.block.form in ("all_to_all", "all_to_all_capacity"):
            _check_exchange(run, result)
        else:
            _check_partial_sums(run, result)
    except ContractBroken as error:
        raise ContractBroken(f"with {scenario.name}, {error}") from None
    except NotThisForm:
        raise
    except Exception as error:
        # A node that cannot run on the mock's numbers means that the guess about the block was wrong.
        raise ContractBroken(f"with {scenario.name}, {why_it_stopped(error)}") from error


class _Run:
    """One run: concrete sizes, concrete expert tensors, and an interpreter of nodes."""

    def __init__(
        self,
        block: ParallelBlock,
        local: LocalForm,
        generator: torch.Generator,
        scenario: Scenario,
        ranges: IndexRanges,
    ) -> None:
        self.block = block
        self.ranges = ranges
        self.local = local
        self.generator = generator
        self.scenario = scenario
        self.sizes = _symbol_sizes(block)
        experts = block.experts
        self.product_tables = [
            (torch.randn(product.inner, generator=generator, dtype=torch.float64),
             torch.randn(experts, product.outer, generator=generator, dtype=torch.float64))
            for product in block.products
        ]  # fmt: skip
        weights = {product.weights for product in block.products}
        self.biases = {
            node: torch.randn((experts, *fake_value(node).shape[1:]), generator=generator, dtype=torch.float64)
            for node in block.expert_tensors
            if node not in weights
        }
        self.own_products = {product.node: number for number, product in enumerate(block.products)}

    def local_form(self, sources: Mapping[Node, Any], result: Node) -> torch.Tensor:
        """What the local form gives for this rank's own `sources`."""
        outputs: torch.Tensor = self.evaluate(self.local.written, dict(sources), _no_collectives)[result]
        return outputs

    def experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The experts alone, activation function and biases included, on `rows` sorted by expert, `counts` [E] of each.

        As the local form has them, for any number of rows: whoever brings them.
        """
        local = self.local
        values: dict[Node, Any] = {local.rows: rows, local.ends: counts.cumsum(0, dtype=torch.int32)}
        if local.row_ids is not None:
            values[local.row_ids] = torch.arange(len(counts)).repeat_interleave(counts)
        needed: set[Node] = set()
        pending = [local.outputs]
        while pending:
            node = pending.pop()
            if node not in needed and node not in values:
                needed.add(node)
                pending.extend(node.all_input_nodes)
        nodes = [node for node in local.written if node in needed]
        outputs: torch.Tensor = self.evaluate(nodes, values, _no_collectives)[local.outputs]
        return outputs

    # ------------------------------------------------------------------------------------------------------ numbers

    def shape(self, node: Node) -> list[int]:
        return [self.size(size) for size in fake_value(node).shape]

    def size(self, size: Any) -> int:
        return _concrete(size, self.sizes)

    def pairs_in_slots(self, capacity: int, experts: int) -> int:
        return capacity * experts if self.scenario.full else min(capacity, 9)

    def peer_pairs(self, peer: int, own_pairs: int, capacity: int | None) -> int:
        """How many pairs the rank `peer` brings for this rank's experts."""
        experts = len(self.block.own_experts)
        if capacity is not None:
            most = self.pairs_in_slots(capacity, experts)
            return most if self.scenario.full else min(self.scenario.peer_pairs, most)
        if self.scenario.load and peer == 0:
            return min(max(self.scenario.load * own_pairs, 4), max(MOST_ROWS, own_pairs))
        return experts if self.scenario.full else self.scenario.peer_pairs

    def rows(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64).sub_(0.5)

    # -------------------------------------------------------------------------------------------------- interpreter

    def evaluate(
        self,
        nodes: Iterable[Node],
        values: dict[Node, Any],
        answer: Callable[[Collective, torch.Tensor, list[int], list[int]], torch.Tensor],
    ) -> dict[Node, Any]:
        """The values of `nodes`, in order; `values` holds those of the sources. `answer` plays the other ranks."""
        values = dict(values)
        for node, value in values.items():
            self.ranges.observe(node, value)

        def value_of(node: Node) -> Any:
            if node not in values:
                values[node] = self._leaf(node)
                self.ranges.observe(node, values[node])
            return values[node]

        for node in nodes:
            if node in values:
                continue
            number = self.own_products.get(node)
            if number is not None:
                values[node] = self._product(number, node, value_of, self.block.own_experts)
            elif node in self.local.products:
                values[node] = self._product(self.local.products[node], node, value_of, range(self.block.experts))
            elif (collective := collective_of(node)) is not None:
                sent = value_of(collective.input)
                send = [int(value_of(size)) if isinstance(size, Node) else size for size in collective.send]
                receive = [int(value_of(size)) if isinstance(size, Node) else size for size in collective.receive]
                values[node] = answer(collective, sent, send, receive)
            elif is_call(node, WAIT):
                values[node] = value_of(node.args[0])  # type: ignore[arg-type]
            else:
                args, kwargs = map_nodes((node.args, node.kwargs), value_of)
                values[node] = node.target(*self._doubled(args), **self._doubled(kwargs))  # type: ignore[operator]
                if is_call(node, *_EMPTY):
                    _spoil(values[node])
            self.ranges.observe(node, values[node])
        return values

    def _leaf(self, node: Node) -> Any:
        value = fake_value(node)
        if node.op == "get_attr":
            return self._constant(node)
        if not isinstance(value, torch.Tensor):
            return self.size(value)
        if node in self.biases:
            owned = self.block.own_experts
            return self.biases[node][owned.start : owned.stop]
        for local, complete in self.local.complete.items():
            if complete is node and local in self.biases:
                return self.biases[local]
        # Weights: only products read them, and these are not computed. A view of one zero takes no memory.
        return torch.zeros((), dtype=torch.float64).expand(self.shape(node))

    @staticmethod
    def _constant(node: Node) -> torch.Tensor:
        value = constant_of(node)
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            raise ContractBroken(f"it reads {node.target}, whose value is not known when the graph is compiled")
        return value.cpu().double() if value.is_floating_point() else value.cpu()

    def _product(self, number: int, node: Node, value_of: Callable[[Node], Any], experts: range) -> torch.Tensor:
        row_factors, expert_factors = self.product_tables[number]
        rows, ends = (value_of(argument) for argument in _rows_and_ends(node))
        if len(ends) != len(experts):
            raise ContractBroken(f"a product has {len(ends)} offsets for {len(experts)} experts")
        counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
        if len(counts) and (int(counts.min()) < 0 or int(ends[-1]) > len(rows)):
            raise ContractBroken(f"a product of {len(rows)} rows has the offsets {ends.tolist()}")
        outputs = torch.empty(len(rows), expert_factors.shape[1], dtype=torch.float64)
        inside = int(counts.sum())
        of_each = zip(outputs[:inside].split(counts.tolist()), rows[:inside].split(counts.tolist()), strict=True)
        for expert, (results, arriving) in zip(experts, of_each, strict=True):
            torch.outer(arriving @ row_factors, expert_factors[expert], out=results)
        # Between -1 and 1, so that no activation function saturates and hides a difference.
        outputs[:inside].sin_()
        outputs[inside:] = math.nan
        return outputs

    @staticmethod
    def _doubled(arguments: Any) -> Any:
        """Arguments of an operator, with float64 for every floating type and this device for every other."""

        def change(argument: Any) -> Any:
            if isinstance(argument, torch.dtype) and argument.is_floating_point:
                return torch.float64
            return torch.device("cpu") if isinstance(argument, torch.device) else argument

        return pytree.tree_map(change, arguments)


def _spoil(memory: torch.Tensor) -> None:
    """Memory that nobody has written may hold anything, by chance also what was wanted of it, and not the same twice.

    Here it holds what no computation goes on with: NaN, an index that nothing has.
    """
    if memory.is_floating_point():
        memory.fill_(math.nan)
    elif memory.dtype is torch.bool:
        memory.bernoulli_(0.5, generator=torch.Generator().manual_seed(0))
    else:
        memory.fill_(UNWRITTEN.get(memory.dtype, torch.iinfo(memory.dtype).max))


def _rows_and_ends(product: Node) -> tuple[Node, Node]:
    names = [argument.name for argument in product.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, product.args, strict=False)), **product.kwargs}
    return given[names[0]], given["offs"]


def _symbol_sizes(block: ParallelBlock) -> dict[Any, int]:
    """A size for each symbol of the block's shapes that is known before a run."""
    symbols: list[Any] = []
    for node in (*block.sources.values(), *block.region):
        value = fake_value(node)
        shape = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in shape:
            if isinstance(size, torch.SymInt):
                shape_env = size.node.shape_env
                symbols += [
                    symbol
                    for symbol in sorted(size.node.expr.free_symbols, key=str)
                    if not shape_env.is_unbacked_symint(symbol)
                ]
    sizes = itertools.chain(SYMBOL_SIZES, itertools.count(SYMBOL_SIZES[-1] + 1))
    return {symbol: next(sizes) for symbol in dict.fromkeys(symbols)}


def _concrete(size: Any, sizes: Mapping[Any, int]) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.expr.xreplace({symbol: sizes[symbol] for symbol in size.node.expr.free_symbols}))


def _no_collectives(collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
    raise ContractBroken(f"the local form holds {collective.kind}")


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    left, right = left.double(), right.double()
    # To the bit is the rule, and faster to tell.
    return torch.equal(left, right) or torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE)


# ----------------------------------------------------------------------------------------------------------- AllToAll


def _check_exchange(run: _Run, result: Node) -> None:
    """What this rank sends, and what it sends back for the rows of others, must follow the contract."""
    block = run.block
    rows_node, counts_node = block.sources["rows"], block.sources["counts"]
    capacity = run.shape(rows_node)[0] // block.experts if block.form == "all_to_all_capacity" else None
    own_pairs = run.shape(rows_node)[0] if capacity is None else run.pairs_in_slots(capacity, block.experts)
    own = _Rows.draw(run, run.scenario.own, own_pairs, range(block.experts), capacity)
    peers = [
        _Rows.draw(run, run.scenario.peers, run.peer_pairs(peer, own_pairs, capacity), block.own_experts, capacity)
        for peer in range(block.group.ranks)
    ]
    counts_exchange, dispatch, combine = block.exchanges
    expected = [_expert_outputs(run, part) for part in peers]

    def answer(collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        if collective.node is counts_exchange.node:
            _demand(_equal(sent.reshape(-1), own.counts), "it sends counts that are not those of its rows")
            arriving = torch.stack([part.counts[block.own_experts.start : block.own_experts.stop] for part in peers])
            unit = sent.numel() // max(1, sent.shape[0])
            _demand(receive == [len(block.own_experts) // max(unit, 1)] * block.group.ranks, "it expects other counts")
            return arriving.reshape(-1, *sent.shape[1:]).to(sent.dtype)
        if collective.node is dispatch.node:
            _demand(_equal(sent, own.rows), "it sends other rows than it counted")
            _demand(send == own.sizes_by_rank(block.bounds), f"it sends rows in parts of {send}")
            _demand(receive == [len(part.rows) for part in peers], f"it expects rows in parts of {receive}")
            return torch.cat([part.rows for part in peers])
        if collective.node is combine.node:
            _demand(_equal(sent, torch.cat(expected)), "it sends back other outputs than its experts' for the rows")
            return _expert_outputs(run, own)
        raise ContractBroken(f"it needs an answer to {collective.kind}")

    values = {rows_node: own.rows, counts_node: own.counts.view(run.shape(counts_node))}
    run.evaluate(block.region, values, answer)
    _demand(_equal(run.local_form(values, result), _expert_outputs(run, own)), "its local form gives something else")


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows sorted by expert and `counts` [E] of them; with a capacity, that many slots for each of `experts`."""

    rows: torch.Tensor
    counts: torch.Tensor
    experts: range
    capacity: int | None

    @staticmethod
    def draw(
        run: _Run,
        draw: Callable[[torch.Generator, int, int], torch.Tensor],
        pairs: int,
        experts: range,
        capacity: int | None,
    ) -> _Rows:
        total = run.block.experts
        counts = torch.zeros(total, dtype=torch.int64)
        if len(experts):
            chosen = experts.start + draw(run.generator, pairs, len(experts))
            counts = torch.bincount(chosen, minlength=total)
        width = run.block.products[0].inner
        if capacity is None:
            return _Rows(run.rows(int(counts.sum()), width), counts, experts, None)
        counts = counts.clamp(max=capacity)
        rows = run.rows(len(experts) * capacity, width)
        return _Rows(rows, counts, experts, capacity)

    def sizes_by_rank(self, bounds: Sequence[int]) -> list[int]:
        if self.capacity is not None:
            return [(stop - start) * self.capacity for start, stop in itertools.pairwise(bounds)]
        return [int(self.counts[start:stop].sum()) for start, stop in itertools.pairwise(bounds)]


def _expert_outputs(run: _Run, part: _Rows) -> torch.Tensor:
    """What the experts give for `part`: each row's output in its place, zeros for slots that are not filled."""
    if part.capacity is None:
        return run.experts(part.rows, part.counts)
    filled = torch.arange(part.capacity) < part.counts[part.experts.start : part.experts.stop].unsqueeze(-1)
    outputs = run.experts(part.rows[filled.view(-1)], part.counts)
    slots = torch.zeros(len(part.rows), outputs.shape[1], dtype=torch.float64)
    slots[filled.view(-1)] = outputs
    return slots


# ------------------------------------------------------------------------------------------------------- partial sums


def _check_partial_sums(run: _Run, result: Node) -> None:
    """What this rank adds must be its own experts' part, for its own tokens and for those of others."""
    block = run.block
    tokens, top_k = run.shape(block.sources["ids"])
    ranks, own_rank = block.group.ranks, block.group.rank
    gathered = block.form == "all_gather"
    most = max(1, run.scenario.load) * tokens + 3 if gathered and _is_padded(block) else tokens
    batches = [
        _Tokens.draw(run, tokens if rank == own_rank else most, top_k) for rank in range(ranks if gathered else 1)
    ]
    own = batches[own_rank if gathered else 0]
    combine = block.exchanges[-1]

    def answer(collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        if collective.node is combine.node:
            partial = [batch.outputs(run, block.own_experts) for batch in batches]
            parts = sent.split(most)
            _demand(len(parts) == len(batches), f"it adds up {len(sent)} rows, not those of all tokens")
            for part, wanted in zip(parts, partial, strict=True):
                _demand(_equal(part[: len(wanted)], wanted), "it does not add exactly its own experts' part")
            total = own.outputs(run, range(block.experts))
            return F.pad(total, (0, 0, 0, most - tokens), value=math.nan)
        if collective.kind == "all_reduce" and gathered:
            _demand(collective.reduction == "max" and sent.numel() == 1, "it reduces something unknown")
            _demand(int(sent) == tokens, "it reduces something other than its number of tokens")
            return torch.full_like(sent, most)
        if collective.kind == "all_gather" and gathered:
            return _gather(sent, batches, own_rank, most)
        raise ContractBroken(f"it needs an answer to {collective.kind}")

    values: dict[Node, Any] = {node: getattr(own, role) for role, node in block.sources.items()}
    found = run.evaluate(block.region, values, answer)
    _demand(_equal(run.local_form(values, result), found[block.sink]), "its local form gives something else")


def _gather(sent: torch.Tensor, batches: Sequence[_Tokens], own_rank: int, most: int) -> torch.Tensor:
    """All ranks' rows of the kind that this rank sends. Others bring `most` tokens, so none of theirs is padding."""
    for role in ("hidden", "ids", "weights"):
        mine = getattr(batches[own_rank], role)
        if sent.is_floating_point() == mine.is_floating_point() and _equal(sent[: len(mine)], mine):
            _demand(len(sent) == most, f"it gathers {len(sent)} rows of {role}, where {most} were agreed on")
            return torch.cat([sent if rank == own_rank else getattr(batch, role) for rank, batch in enumerate(batches)])
    raise ContractBroken("it gathers something that is neither tokens, nor their experts, nor their weights")


def _is_padded(block: ParallelBlock) -> bool:
    return any(exchange.kind == "all_reduce" for exchange in block.exchanges)


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """One rank's tokens: hidden [n, H], ids [n, k], weights [n, k]."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def draw(run: _Run, tokens: int, top_k: int) -> _Tokens:
        ids = run.scenario.own(run.generator, tokens * top_k, run.block.experts).view(tokens, top_k).contiguous()
        return _Tokens(run.rows(tokens, run.block.products[0].inner), ids, run.rows(tokens, top_k))

    def outputs(self, run: _Run, experts: range) -> torch.Tensor:
        """The weighted sum over those of each token's experts that are among `experts`."""
        top_k = self.ids.shape[1]
        ids, order = self.ids.reshape(-1).sort(stable=True)
        rows = run.experts(self.hidden[order // top_k], torch.bincount(ids, minlength=run.block.experts))
        inside = (ids >= experts.start) & (ids < experts.stop)
        weighed = rows * (self.weights.reshape(-1)[order] * inside).unsqueeze(-1)
        total = torch.zeros(len(self.hidden), rows.shape[1], dtype=torch.float64)
        return total.index_add(0, order // top_k, weighed)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContractBroken(otherwise)

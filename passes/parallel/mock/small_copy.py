"""Make a small copy of a parallel block: few features, and a symbol for its number of tokens or slots.

Contract
    in    a block, the local form that was written for it, and its data nodes
    out   a copy in another graph, with the same calls, in which numbers are replaced by symbols or small numbers. With
          the captured sizes it has the captured numbers, so a proof for all sizes holds for the captured block.
          Several copies if numbers have several readings; NoSmallCopy without any; ContractBroken if the block breaks
          its contract with small sizes, for every reading

Features become fewer if the block treats all alike (feature_flow.py). A search finds out which numbers are sizes
(small_guess.py), for each set of sizes that may be small, the smallest first.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from moepass.passes.graph.nodes import fake_value, map_nodes
from moepass.passes.parallel.mock.feature_flow import feature_dependent_node
from moepass.passes.parallel.mock.mock_run import MockBlock, MockRun
from moepass.passes.parallel.mock.small_guess import Guess, NoSmallCopy, SmallMock, guesses, read_numbers, size_readings
from moepass.passes.parallel.mock.small_sizes import Reading, run_bytes, scales

# A size of more symbols, such as a sum over hundreds of ranks, becomes an unknown size.
_MOST_SYMBOLS = 8
# [Empirical] After a failed proof, a copy must use this many times less memory, so that it does not run for seconds.
_RETRY_DIVISOR = 16
# Limit on the copies of one scale, if numbers have several readings.
_MOST_COPIES = 6


@dataclasses.dataclass(frozen=True)
class SmallCopy:
    """A copy that is ready to run, and its data nodes."""

    mock: MockBlock
    data: set[Node]


def small_copies(
    mock: MockBlock, data: set[Node], check: Callable[[MockRun], None], most_bytes: int
) -> Iterator[SmallCopy]:
    """Yield small copies, the likeliest first. `check` raises if a run breaks the contract of the block's form.

    Raises NoSmallCopy if none runs in `most_bytes`, and ContractBroken as above.
    """
    node = feature_dependent_node(mock.block, mock.local, data)
    reason = "" if node is None else f"{node.name} ({node.target}) may treat features differently"
    has_copy = False
    for scale in scales(mock.block, features_alike=node is None):
        if has_copy and scale.growing is not None:
            continue
        if run_bytes(mock, scale) > (most_bytes // _RETRY_DIVISOR if has_copy else most_bytes):
            continue
        small = SmallMock(mock, scale)
        try:
            for guess in itertools.islice(guesses(small, check), _MOST_COPIES):
                small_copy = BlockCopier(small, guess).copy(data)
                has_copy = True
                yield small_copy
        except NoSmallCopy as error:
            reason = reason or str(error)
        # A proof may need the captured number of slots, or a single token, for which torch specialises operators.
        is_single = scale.growing is not None and scale.growing.captured == 1
        if has_copy and mock.block.form != "all_to_all_slots" and not is_single:
            return
    if not has_copy:
        raise NoSmallCopy(reason or "nothing in it can be smaller")


class BlockCopier:
    """Copies a block and its local form into a new graph, with the numbers of `guess`."""

    def __init__(self, small: SmallMock, guess: Guess) -> None:
        self._small = small
        self._guess = guess
        self._graph = Graph()
        self._graph.owning_module = small.block.sink.graph.owning_module
        self._nodes: dict[Node, Node] = {}
        self._env = ShapeEnv()
        self._fake_mode = FakeTensorMode(shape_env=self._env)
        self._symbols: dict[Any, Any] = {}
        self._unknown: dict[Any, torch.SymInt] = {}
        # Fake tensors by type and shape, since hundreds of ranks have hundreds of tensors of one number.
        self._tensors: dict[Any, torch.Tensor] = {}
        self._sizes: dict[Reading, Node] = {}
        growing = small.scale.growing
        self._growing: Any = None if growing is None else self._symbol("growing", growing.small)

    def copy(self, data: set[Node]) -> SmallCopy:
        """Return the copy, with the copies of the `data` nodes."""
        block, local = self._small.block, self._small.local
        for node in dict.fromkeys((*block.sources.values(), *block.expert_tensors, *local.complete.values())):
            self._leaf(node)
        region, written = self.calls(block.region), self.calls(local.written)
        for node in (*region, *written):
            self._call(node)
        for exchange in block.exchanges:
            for node in (exchange.node, exchange.input, exchange.result):
                if node not in self._nodes:
                    raise NoSmallCopy(f"its exchange {exchange.node.name} uses {node.name}, which is outside it")
        widths = zip(block.gemms, self._small.widths, strict=True)
        gemms = [dataclasses.replace(gemm, inner=inner, outer=outer) for gemm, (inner, outer) in widths]
        small_block = self._mapped(dataclasses.replace(block, gemms=tuple(gemms), region=tuple(region)))
        small_local = copy.copy(local)
        vars(small_local).update(self._mapped({**vars(local), "written": list(written)}))
        small_local.block, small_local.graph = small_block, self._graph
        functions = self._mapped(self._small.functions)
        mock = MockBlock(small_block, small_local, self._nodes[self._small.result], functions)
        return SmallCopy(mock, {self._nodes[node] for node in data if node in self._nodes})

    def _mapped(self, value: Any) -> Any:
        """Return `value`, a nesting of records and containers, with each node replaced by its copy, if it has one."""
        if isinstance(value, Node):
            return self._nodes.get(value, value)
        if isinstance(value, dict):
            return {self._mapped(key): self._mapped(item) for key, item in value.items()}
        if isinstance(value, (tuple, list, set, frozenset)):
            return type(value)(map(self._mapped, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = (field.name for field in dataclasses.fields(value))
            return dataclasses.replace(value, **{name: self._mapped(getattr(value, name)) for name in names})
        return value

    def calls(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return the `nodes` of the block or the local form that the copy calls. The remaining nodes become leaves."""
        return nodes

    def expression(self, size: torch.SymInt) -> Any:
        """Return the expression of a captured size in the copy."""
        return size.node.expr

    def _call(self, node: Node) -> None:
        origin = self._small.local.origins.get(node, node)
        readings = self._guess.readings.get(origin, {})
        args, kwargs = map_nodes(read_numbers(node, readings, self._number), self._copied)
        value = fake_value(node)
        is_arithmetic = getattr(node.target, "__module__", "") == "_operator" and node.target is not operator.getitem
        if isinstance(value, torch.SymInt) and is_arithmetic:
            # The size follows from the copied arguments.
            size = node.target(*map_nodes(args, fake_value))  # type: ignore[operator]
            self._add(node, node.op, args, kwargs, size)
        else:
            self._add(node, node.op, args, kwargs, self._described(value, self._guess.shapes.get(node)))

    def _copied(self, node: Node) -> Node:
        if node.graph is self._graph:  # a size that replaces a number
            return node
        if node not in self._nodes:
            self._leaf(node)
        return self._nodes[node]

    def _leaf(self, node: Node) -> None:
        value, op = fake_value(node), "get_attr" if node.op == "get_attr" else "placeholder"
        if op == "get_attr":
            small = value
        else:
            small = self._described(value, self._small.shape(node) if isinstance(value, torch.Tensor) else None)
        self._add(node, op, (), {}, small)

    def _add(self, node: Node, op: str, args: Any, kwargs: Any, value: Any) -> None:
        target = node.target if op != "placeholder" else node.name
        added = self._graph.create_node(op, target, args, kwargs, name=node.name)
        added.meta = {**node.meta, "val": value}
        self._nodes[node] = added

    def _number(self, reading: Reading) -> int | Node:
        """Return a number among arguments: a node if it grows."""
        if not reading.grows:
            return reading.small
        if reading not in self._sizes:
            node = self._graph.placeholder("captured_size")
            node.meta["val"] = self._grown(reading)
            self._sizes[reading] = node
        return self._sizes[reading]

    def _described(self, value: Any, shape: Any) -> Any:
        """Return the copy of a captured value. `shape` has its small sizes; None keeps them as captured."""
        if isinstance(value, (tuple, list)):
            shapes = [None] * len(value) if shape is None else shape
            return type(value)(self._described(item, of_item) for item, of_item in zip(value, shapes, strict=True))
        if isinstance(value, torch.Tensor):
            small = [None] * value.dim() if shape is None else shape
            return self._tensor(value, map(self._size, value.shape, small))
        return self._size(value, None) if isinstance(value, torch.SymInt) else value

    def _tensor(self, captured: torch.Tensor, shape: Any) -> torch.Tensor:
        sizes = tuple(shape)
        key = (captured.dtype, *sizes) if all(isinstance(size, int) for size in sizes) else None
        if key not in self._tensors:
            with self._fake_mode:
                made = torch.empty(sizes, dtype=captured.dtype)
            if key is None:
                return made
            self._tensors[key] = made
        return self._tensors[key]

    def _size(self, captured: Any, small: int | None) -> Any:
        """Return the copy of a captured size; `small` is its value in the guess, None if it stays as captured."""
        if isinstance(captured, torch.SymInt):
            return self._expression(captured)
        if small is None or small == captured or not isinstance(captured, int):
            return captured
        grown = [reading for reading in size_readings(self._small.scale, captured) if reading.small == small]
        return self._grown(grown[0]) if grown and grown[0].grows else small

    def _grown(self, reading: Reading) -> Any:
        expression = reading.factor * self._growing + reading.offset
        return self._env.create_symintnode(expression, hint=reading.small)

    def _expression(self, size: torch.SymInt) -> Any:
        expression = self.expression(size)
        if len(expression.free_symbols) > _MOST_SYMBOLS:
            return self._unknown.setdefault(expression, self._env.create_unbacked_symint())
        symbols = {symbol: self._copied_symbol(symbol) for symbol in sorted(expression.free_symbols, key=str)}
        constant, symbolic = expression.as_coeff_Add()
        grown = [reading for reading in size_readings(self._small.scale, int(constant)) if reading.grows]
        if constant and grown:
            constant = grown[0].factor * self._growing + grown[0].offset
        return self._env.create_symintnode(constant + symbolic.xreplace(symbols), hint=None)

    def _copied_symbol(self, symbol: Any) -> Any:
        if symbol not in self._symbols:
            size = self._small.sizes.get(symbol)
            unknown = self._env.create_unbacked_symint
            self._symbols[symbol] = unknown().node.expr if size is None else self._symbol(str(symbol), size)
        return self._symbols[symbol]

    def _symbol(self, name: str, size: int) -> Any:
        return self._env.create_symbol(
            size, ConstantSource(name), DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True
        )

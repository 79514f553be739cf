"""Read an expert program as kernels: the grouped GEMMs, and the loads and computations of their tiles.

A GEMM computes tiles of its result: some rows of one expert times some columns. Other operations of the program on
these rows and columns can run while the tile is in registers. So each value that must be in memory is stored by the
kernel of the last GEMM on which it depends, and is computed there from this GEMM's result and from memory.

    in memory     the program's inputs and outputs, the rows that a GEMM multiplies (unless they are looked up in a
                  table, from which the kernel reads them), and values of earlier GEMMs that a kernel needs
    tile value    one step of a tile's computation, for all its rows and columns; a kernel's values are in order, and
                  later ones refer to earlier ones by index
    columns       a value may need different columns of its operand, such as one half, or every second one

Pseudo-code
    in reverse program order, for each GEMM
        for every value in memory that depends on it, and on no later GEMM
            record how it is computed, back to the GEMM's result and to memory
            values of earlier GEMMs that it reads must be in memory
    values in memory that depend on no GEMM are row work before the first kernel
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.traits import Trait, has_trait
from moepass.passes.segments.expert_program import (
    ExpertProgram,
    GroupedGemm,
    NotByExpertError,
    RowWork,
    constant_number,
)

aten = torch.ops.aten

# The rows of an operand that a tile loads: those of the tile, or a single row that is the same for all.
OWN_ROWS, ONE_ROW = "own rows", "one row"


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns `step` · j + `start` of a value, where j are the columns of a tile."""

    start: int = 0
    step: int = 1

    def within(self, outer: Columns) -> Columns:
        """Return these columns of a slice as columns of the sliced value. The slice has its columns `outer`."""
        return Columns(outer.step * self.start + outer.start, outer.step * self.step)


ONE_COLUMN = Columns(0, 0)


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """Columns of the GEMM's result, before they are stored."""

    columns: Columns
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Columns of an operand in memory.

    Attributes:
        operand: index of the operand
        rows: OWN_ROWS, ONE_ROW, or the index of an operand with one row index for each row of the tile
    """

    operand: int
    rows: str | int
    columns: Columns
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class ValueRef:
    """A reference to tile value number `index`, as an argument of a `Computed`."""

    index: int


@dataclasses.dataclass(frozen=True)
class Computed:
    """A pointwise operator on values and constants, one for each argument of its schema. A cast has only its value."""

    operator: Any
    arguments: tuple[ValueRef | float | int | bool | str | None, ...]
    dtype: torch.dtype


TileValue = Accumulated | Loaded | Computed


@dataclasses.dataclass(frozen=True)
class GemmKernel:
    """One grouped GEMM, and the values that its kernel stores.

    Attributes:
        operands: memory that the kernel reads, besides the GEMM's weights and the ends of experts
        rows: index of the operand with the rows that are multiplied
        row_numbers: index of the operand with the row of `rows` for each row of the program; None if they are the same
        values: computations of a tile, in order
        outputs: values that are stored
        places: their indices among `values`
        orders: for each output, the index of the operand with the target row of each row; None if they are the same
        width: columns of an output and of the tiles. An output with one column is stored by the tiles of the first
            columns
    """

    gemm: GroupedGemm
    operands: tuple[Node, ...]
    rows: int
    row_numbers: int | None
    values: tuple[TileValue, ...]
    outputs: tuple[Node, ...]
    places: tuple[int, ...]
    orders: tuple[int | None, ...]
    width: int


@dataclasses.dataclass(frozen=True)
class ExpertKernels:
    """Row work, if any, and then kernels in order, which compute the program's outputs."""

    before: RowWork | None
    kernels: tuple[GemmKernel, ...]


def read_kernels(program: ExpertProgram) -> ExpertKernels:
    """Return the kernels of `program`. Raises NotByExpertError if a tile cannot compute the row work."""
    return _Reader(program).read()


class _Reader:
    def __init__(self, program: ExpertProgram) -> None:
        self.program = program
        self.gemms = {step.node: step for step in program.steps if isinstance(step, GroupedGemm)}
        self.work = [node for step in program.steps if isinstance(step, RowWork) for node in step.nodes]
        self.inputs = {*program.row_inputs, *program.fixed}
        self.last_gemm = self._last_gemms()
        self.in_memory: dict[Node, None] = dict.fromkeys(program.outputs)  # an ordered set
        self.orders = {
            node: order for node, order in zip(program.outputs, program.orders, strict=True) if order is not None
        }
        for node in self.orders:
            if self.last_gemm[node] is None:
                raise NotByExpertError(
                    node, f"no GEMM comes before {named(node)}, whose rows return to the order of tokens"
                )

    def _last_gemms(self) -> dict[Node, Node | None]:
        """Return for each value the last GEMM on which it depends."""
        order = {node: index for index, node in enumerate(self.gemms)}
        last: dict[Node, Node | None] = dict.fromkeys(self.inputs)
        work = set(self.work)
        for node in self.program.ends.graph.nodes:
            if node in self.gemms:
                last[node] = node
            elif node in work:
                gemms = [gemm for used in node.all_input_nodes if (gemm := last[used]) is not None]
                last[node] = max(gemms, key=order.__getitem__, default=None)
        return last

    def read(self) -> ExpertKernels:
        kernels = [self._kernel(gemm) for gemm in reversed(self.gemms.values())]
        before = {node for node in self.in_memory if node not in self.inputs and self.last_gemm[node] is None}
        return ExpertKernels(self._row_work(before), tuple(reversed(kernels)))

    def _row_work(self, outputs: set[Node]) -> RowWork | None:
        if not outputs:
            return None
        needed = set(outputs)
        for node in reversed(self.work):
            if node in needed:
                needed.update(used for used in node.all_input_nodes if used not in self.inputs)
        nodes = tuple(node for node in self.work if node in needed)
        inputs = tuple(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in needed))
        return RowWork(nodes, inputs, tuple(node for node in nodes if node in outputs))

    def _kernel(self, gemm: GroupedGemm) -> GemmKernel:
        tile = _Tile(self, gemm)
        is_lookup = gemm.rows not in self.inputs and is_call(gemm.rows, aten.index.Tensor)
        if is_lookup and gemm.rows not in self.in_memory:
            table, (chosen,) = _arguments(gemm.rows)
            rows, row_numbers = tile.operand(table), tile.operand(self.from_memory(chosen, gemm.node))
        else:
            rows, row_numbers = tile.operand(self.from_memory(gemm.rows, gemm.node)), None
        outputs = [node for node in self.in_memory if node not in self.inputs and self.last_gemm[node] is gemm.node]
        widths = {self.width(node) for node in outputs}
        if len(widths - {1}) > 1:
            reason = f"the values stored after {named(gemm.node)} have {' and '.join(map(str, sorted(widths)))} columns"
            raise NotByExpertError(gemm.node, reason)
        places = [tile.value(node, Columns()) for node in outputs]
        orders = [None if node not in self.orders else tile.operand(self.orders[node]) for node in outputs]
        return GemmKernel(
            gemm,
            tuple(tile.operands),
            rows,
            row_numbers,
            tuple(tile.values),
            tuple(outputs),
            tuple(places),
            tuple(orders),
            max(widths, default=1),
        )

    def from_memory(self, node: Node, reader: Node) -> Node:
        """Return `node`, and note that the kernel of `reader` loads it from memory."""
        if node not in self.inputs:
            if self.last_gemm[node] is reader:
                raise NotByExpertError(
                    node, f"{named(reader)} needs {named(node)} of rows or columns that other tiles compute"
                )
            self.in_memory.setdefault(node)
        return node

    def width(self, node: Node) -> int:
        """Return the number of columns of a value. A vector with one number per row, or a scalar, has one column."""
        value = fake_value(node)
        with_rows = node not in self.program.fixed
        sizes = value.shape[1:] if with_rows else value.shape[-1:]
        if value.dim() > 2 or not all(isinstance(size, int) for size in sizes):
            raise NotByExpertError(node, f"{named(node)} has {value.dim()} dimensions, not rows and columns")
        return int(sizes[0]) if len(sizes) else 1


class _Tile:
    """The computations of a tile of one GEMM's kernel."""

    def __init__(self, reader: _Reader, gemm: GroupedGemm) -> None:
        self.reader = reader
        self.gemm = gemm
        self.operands: list[Node] = []
        self.values: list[TileValue] = []
        self._places: dict[tuple[Node, Columns], int] = {}

    def operand(self, node: Node) -> int:
        if node not in self.operands:
            self.operands.append(node)
        return self.operands.index(node)

    def value(self, node: Node, columns: Columns) -> int:
        """Return the index in `values` of the value that holds these columns of `node`. Add the value if necessary."""
        if self.reader.width(node) == 1:
            columns = ONE_COLUMN
        key = node, columns
        if key not in self._places:
            self._places[key] = self._made(node, columns)
        return self._places[key]

    def _made(self, node: Node, columns: Columns) -> int:
        reader = self.reader
        if node is self.gemm.node:
            return self._append(Accumulated(columns, fake_value(node).dtype))
        if node in reader.inputs or reader.last_gemm[node] not in (None, self.gemm.node):
            rows = ONE_ROW if node in reader.program.fixed else OWN_ROWS
            number = self.operand(reader.from_memory(node, self.gemm.node))
            return self._append(Loaded(number, rows, columns, fake_value(node).dtype))
        if node.target is operator.getitem:
            split, index = cast("tuple[Node, int]", node.args)
            start = sum(int(chunk.shape[1]) for chunk in fake_value(split)[:index])
            return self.value(split.all_input_nodes[0], columns.within(Columns(start)))
        arguments = _arguments(node)
        if is_call(node, aten.index.Tensor):
            table, (chosen,) = arguments
            numbers = self.operand(reader.from_memory(chosen, self.gemm.node))
            return self._append(Loaded(self.operand(table), numbers, columns, fake_value(node).dtype))
        if is_call(node, aten.slice.Tensor):
            source, _, start, end, step = arguments
            return self.value(source, columns.within(Columns(slice(start, end).indices(reader.width(source))[0], step)))
        if is_call(node, aten.select.int):
            source, _, index = arguments
            return self.value(source, Columns(index % reader.width(source), 0))
        if is_call(node, aten.unsqueeze.default):
            return self.value(arguments[0], columns)
        operands = self._computed_from(node, arguments, columns)
        return self._append(Computed(node.target, operands, fake_value(node).dtype))

    def _append(self, value: TileValue) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _computed_from(self, node: Node, arguments: Sequence[Any], columns: Columns) -> tuple[Any, ...]:
        operands: list[Any] = []
        for value in arguments[:1] if has_trait(node, Trait.CAST) else arguments:
            if isinstance(value, Node):
                number = constant_number(value)
                operands.append(ValueRef(self.value(value, columns)) if number is None else number)
            elif value is None or isinstance(value, (bool, int, float, str)):
                operands.append(value)
            else:
                raise NotByExpertError(
                    node, f"{named(node)} has the argument {value!r}; it must be a tensor or a number"
                )
        return tuple(operands)


def _arguments(node: Node) -> list[Any]:
    """Return the arguments of a call in the order of its operator's schema, with defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values = dict(zip((argument.name for argument in schema), node.args, strict=False))
    values.update(node.kwargs)
    return [values.get(argument.name, argument.default_value) for argument in schema]

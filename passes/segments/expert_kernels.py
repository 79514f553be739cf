"""Read an expert program as kernels: each grouped GEMM, what its tiles load, and what is done before they are stored.

A GEMM computes tiles of its result: some rows of one expert times some columns. Whatever else the program computes for
these rows and columns can be done while the tile is in registers. So each value that has to be in memory is stored by
the kernel of the last GEMM that it depends on, and is computed there from that GEMM's own result and from memory.

    in memory     the program's inputs and outputs, the rows that a GEMM multiplies (but for rows that are looked up in
                  a table: those are read where they lie), and what a kernel needs of an earlier GEMM
    tile value    one step of a tile's computation, for all its rows and columns; a kernel's values are in order, and
                  later ones name earlier ones by their place
    columns       a value may need other columns of its operand than its own: halves, or every second one

Pseudo-code
    against the program's order, for each GEMM
        for every value in memory that depends on it, and on no later GEMM
            write down how it is computed, back to the GEMM's result and to memory
            values of earlier GEMMs that are met on the way have to be in memory
    what is in memory and depends on no GEMM is row work before the first kernel
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
from moepass.passes.segments.expert_program import (
    ExpertProgram,
    GroupedGemm,
    NotByExpertError,
    RowWork,
    constant_number,
)

aten = torch.ops.aten

_CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
# Which rows of an operand a tile loads: its own, or the one that is the same for all.
OWN_ROWS, ONE_ROW = "own rows", "one row"


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns `step` · j + `start` of a value, where j are the columns of a tile."""

    start: int = 0
    step: int = 1

    def within(self, outer: Columns) -> Columns:
        """The same columns, as columns of a value whose columns `outer` these ones count."""
        return Columns(outer.step * self.start + outer.start, outer.step * self.step)


ONE_COLUMN = Columns(0, 0)


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """Columns of the GEMM's own result."""

    columns: Columns
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Columns of the memory of an operand, by its number.

    `rows` are OWN_ROWS, ONE_ROW, or the number of an operand that names one row for each row of the tile.
    """

    operand: int
    rows: str | int
    columns: Columns
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class At:
    """An argument of a function: the value at this place."""

    place: int


@dataclasses.dataclass(frozen=True)
class Computed:
    """A pointwise operator on values and constants, one for each argument of its schema; a cast has its value alone."""

    operator: Any
    arguments: tuple[At | float | int | bool | str | None, ...]
    dtype: torch.dtype


TileValue = Accumulated | Loaded | Computed


@dataclasses.dataclass(frozen=True)
class GemmKernel:
    """One grouped GEMM, and what is stored of it.

    operands      memory that the kernel reads, beside the GEMM's weights and the ends of experts
    rows          number of the operand that has the rows which are multiplied
    row_numbers   number of the operand that names, for each row of the program, its row of `rows`; None: they are the
                  program's own rows
    values        what is computed for a tile, in order
    outputs       what is stored, `places` where among `values` it stands, and `width` its columns, the tiles' columns;
                  an output with one column is stored by the tiles of the first columns
    orders        for each output the number of the operand that says which of its rows each row becomes; None: its own
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
    """`before`, where there is any, and then `kernels` in order, compute the program's outputs."""

    before: RowWork | None
    kernels: tuple[GemmKernel, ...]


def read_kernels(program: ExpertProgram) -> ExpertKernels:
    """The kernels of `program`. Raises NotByExpertError for row work that no tile can do."""
    return _Reader(program).read()


class _Reader:
    def __init__(self, program: ExpertProgram) -> None:
        self.program = program
        self.gemms = {step.node: step for step in program.steps if isinstance(step, GroupedGemm)}
        self.work = [node for step in program.steps if isinstance(step, RowWork) for node in step.nodes]
        self.inputs = {*program.row_inputs, *program.fixed}
        self.last_gemm = self._last_gemms()
        self.in_memory: dict[Node, None] = dict.fromkeys(program.outputs)  # a set that keeps its order
        self.orders = {
            node: order for node, order in zip(program.outputs, program.orders, strict=True) if order is not None
        }
        for node in self.orders:
            if self.last_gemm[node] is None:
                raise NotByExpertError(node, f"no GEMM comes before {named(node)}, whose rows are brought back")

    def _last_gemms(self) -> dict[Node, Node | None]:
        """For each value the last GEMM that it depends on."""
        order = {node: place for place, node in enumerate(self.gemms)}
        last: dict[Node, Node | None] = dict.fromkeys(self.inputs)
        work = set(self.work)
        for node in self.program.ends.graph.nodes:
            if node in self.gemms:
                last[node] = node
            elif node in work:
                met = [found for used in node.all_input_nodes if (found := last[used]) is not None]
                last[node] = max(met, key=order.__getitem__, default=None)
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
            reason = f"what is stored of {named(gemm.node)} has {' and '.join(map(str, sorted(widths)))} columns"
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
        """`node`, which the kernel of `reader` finds in memory."""
        if node not in self.inputs:
            if self.last_gemm[node] is reader:
                raise NotByExpertError(node, f"{named(reader)} needs {named(node)} of other rows or columns of its own")
            self.in_memory.setdefault(node)
        return node

    def width(self, node: Node) -> int:
        """Columns of a value. One number per row is one column; so is a value without dimensions."""
        value = fake_value(node)
        with_rows = node not in self.program.fixed
        sizes = value.shape[1:] if with_rows else value.shape[-1:]
        if value.dim() > 2 or not all(isinstance(size, int) for size in sizes):
            raise NotByExpertError(node, f"{named(node)} has {value.dim()} dimensions, not rows and columns")
        return int(sizes[0]) if len(sizes) else 1


class _Tile:
    """Writes down how the values of one GEMM's kernel are computed."""

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
        """The place of these columns of `node`."""
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
            start = sum(int(part.shape[1]) for part in fake_value(split)[:index])
            return self.value(split.all_input_nodes[0], columns.within(Columns(start)))
        given = _arguments(node)
        if is_call(node, aten.index.Tensor):
            table, (chosen,) = given
            numbers = self.operand(reader.from_memory(chosen, self.gemm.node))
            return self._append(Loaded(self.operand(table), numbers, columns, fake_value(node).dtype))
        if is_call(node, aten.slice.Tensor):
            source, _, start, end, step = given
            return self.value(source, columns.within(Columns(slice(start, end).indices(reader.width(source))[0], step)))
        if is_call(node, aten.select.int):
            source, _, index = given
            return self.value(source, Columns(index % reader.width(source), 0))
        if is_call(node, aten.unsqueeze.default):
            return self.value(given[0], columns)
        return self._append(Computed(node.target, self._computed_from(node, given, columns), fake_value(node).dtype))

    def _append(self, value: TileValue) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _computed_from(self, node: Node, given: Sequence[Any], columns: Columns) -> tuple[Any, ...]:
        arguments: list[Any] = []
        for value in given[:1] if is_call(node, *_CASTS) else given:
            if isinstance(value, Node):
                number = constant_number(value)
                arguments.append(At(self.value(value, columns)) if number is None else number)
            elif value is None or isinstance(value, (bool, int, float, str)):
                arguments.append(value)
            else:
                raise NotByExpertError(node, f"{named(node)} takes {value!r}, which is no number")
        return tuple(arguments)


def _arguments(node: Node) -> list[Any]:
    """The arguments of a call in the order of its operator's schema, with defaults where none are given."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema), node.args, strict=False))
    given.update(node.kwargs)
    return [given.get(argument.name, argument.default_value) for argument in schema]

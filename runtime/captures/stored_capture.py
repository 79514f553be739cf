"""Record one call of a compiled model, and serve such calls from the record, in this process or a later one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import Graph

from moepass.models.errors import InputError
from moepass.models.formulas.text import evaluate_text
from moepass.passes.graph.graph_records import NotStorableError, read_graph, record_graph
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, graph_inputs, is_call, symbolic_sizes
from moepass.passes.graph.written_inputs import writes_to_inputs
from moepass.passes.ir.plan import dtype_name
from moepass.passes.ir.protocol import PassContext
from moepass.passes.ir.slot_operations import BANK_TENSOR
from moepass.passes.schedule.predict import decisions_for
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.captures.capture_record import (
    ANY_SIZE,
    RELATIONS,
    ArgumentInput,
    CaptureRecord,
    Condition,
    SizeInput,
    StateInput,
    TensorLayout,
    size_texts,
)
from moepass.runtime.captures.capture_watch import CaptureWatch, CompiledGraph, GraphRun
from moepass.runtime.captures.fingerprint import file_digests, variables_of
from moepass.runtime.execute.executor import Executor
from moepass.runtime.lowering.segment_records import read_segments, reads_compiled_code
from moepass.runtime.torch_private import same_layouts, vector_instructions

# A module, the name of its dictionary of parameters or buffers, and a key in that dictionary.
_TensorPath = tuple[nn.Module, str, str]


def record_capture(watch: CaptureWatch, model: nn.Module, arguments: Sequence[object], result: object) -> CaptureRecord:
    """Return the record of one call of the compiled `model`.

    `watch` was active during the call, and `model` is the model before it was compiled. Raises NotStorableError unless
    the call ran exactly one graph, and that graph depends only on the arguments and the model.
    """
    graph, run = _only_run(watch)
    inputs = graph_inputs(graph.captured.graph)
    tensors: dict[int, list[str]] = {}
    for path, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        tensors.setdefault(id(value), []).append(path)
    positions = {id(value): position for position, value in enumerate(arguments)}
    # Dynamo guards on an argument that is no input of the graph, and these guards are not recorded.
    argument_inputs = {id(value) for value in run.inputs} - tensors.keys()
    if len(positions) != len(arguments) or positions.keys() - argument_inputs:
        raise NotStorableError("an argument of a call is not a tensor, is not read, or is passed twice")
    if any(isinstance(value, nn.Parameter) for value in arguments):
        raise NotStorableError("an argument of the call is an nn.Parameter")
    records: list[StateInput | ArgumentInput | SizeInput] = []
    for node, value in zip(inputs, run.inputs, strict=True):
        described = fake_value(node)
        if isinstance(described, torch.SymInt):
            records.append(SizeInput(_text(described)))
        elif not isinstance(described, torch.Tensor):
            raise NotStorableError(f"the graph's input {node.name} is not a tensor")
        elif id(value) in positions:
            records.append(ArgumentInput(positions[id(value)], _layout(described)))
        elif id(value) in tensors:
            records.append(StateInput(tuple(tensors[id(value)]), _layout(described)))
        else:
            raise NotStorableError(f"the graph's input {node.name} is neither an argument nor a tensor of the model")
    outputs = [position for position, value in enumerate(run.outputs) if value is result]
    if not outputs:
        raise NotStorableError("the result of a call is not an output of the graph")
    sizes: dict[str, tuple[int, int]] = {}  # the argument and dimension that show each size
    for record in records:
        if isinstance(record, ArgumentInput):
            for dim, text in enumerate(record.layout.shape):
                if text.isidentifier():
                    sizes.setdefault(text, (record.position, dim))
    conditions = _conditions(graph.captured.graph)
    for text in size_texts(records, conditions):
        try:
            evaluate_text(text, dict.fromkeys(sizes, ANY_SIZE))
        except InputError as error:
            problem = str(error) if error.name is None else f"no argument has the size {error.name} as a dimension"
            raise NotStorableError(problem) from error
    return CaptureRecord(
        tuple(records),
        sizes,
        conditions,
        len(arguments),
        outputs[0],
        graph.executor.plan,
        record_graph(graph.top.graph),
        graph.segments,
        file_digests({code.co_filename for code in graph.code if not code.co_filename.startswith("<")}),
        {name: value for code in graph.code for name, value in variables_of(code).items()},
        vector_instructions() if any(reads_compiled_code(segment) for segment in graph.segments.values()) else "",
    )


class StoredCapture:
    """A capture for one model. Its executor is created on first use.

    The plan's predictions are recomputed in `context`. Raises ValueError if the model's banks or tensors differ from
    the record.
    """

    def __init__(self, record: CaptureRecord, model: nn.Module, store: BankStore | None, context: PassContext) -> None:
        self._record, self._store, self.context = record, store, context
        self._state = _StateTensors(model, [item for item in record.inputs if isinstance(item, StateInput)])
        banks = [] if store is None else store.banks
        # A plan does not know how banks are decoded; the key of the record covers it.
        specs = {bank.spec.index: dataclasses.replace(bank.spec, stored=(), parts=()) for bank in banks}
        for spec in record.plan.banks:
            if specs.get(spec.index) != dataclasses.replace(spec, in_parts=()):
                raise ValueError(f"bank {spec.index} of the model is {specs.get(spec.index)}; the capture needs {spec}")

    def inputs_for(self, arguments: Sequence[Any]) -> list[Any] | None:
        """Return the graph's inputs for a call with these arguments, or None if the capture does not serve this call.

        Raises ValueError if an expression of the record cannot be evaluated for these sizes.
        """
        record = self._record
        if len(arguments) != record.arguments or not all(isinstance(value, torch.Tensor) for value in arguments):
            return None
        if len({id(value) for value in arguments}) != len(arguments):
            return None  # the code may compare two arguments with `is`
        if any(dim >= arguments[position].dim() for position, dim in record.sizes.values()):
            return None
        sizes = {name: int(arguments[position].shape[dim]) for name, (position, dim) in record.sizes.items()}
        if not all(condition.holds(sizes) for condition in record.conditions):
            return None
        tensors = self._state.read()
        if tensors is None:
            return None
        inputs: list[Any] = []
        state = iter(tensors)
        for item in record.inputs:
            if isinstance(item, SizeInput):
                inputs.append(int(evaluate_text(item.text, sizes)))
            elif isinstance(item, StateInput):
                inputs.append(next(state))
            else:
                value = arguments[item.position]
                if value.requires_grad or isinstance(value, nn.Parameter) or not item.layout.holds_for(value, sizes):
                    return None
                inputs.append(value)
        return inputs

    @functools.cached_property
    def executor(self) -> Executor:
        """The executor of the recorded graph. Raises ValueError if the record describes no valid graph."""
        record, plan = self._record, self._record.plan
        try:
            top = read_graph(record.top, read_segments(record.segments, record.vector_instructions))
            results = top.graph.output_node().args[0]
            if not isinstance(results, (list, tuple)) or not 0 <= record.result < len(results):
                raise ValueError(f"its result is output {record.result} of {results}")
            if plan.decisions is not None:
                # The machine's profile may be another one than when this capture was stored.
                plan = dataclasses.replace(plan, decisions=decisions_for(plan, dict(plan.sizes), self.context))
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"its graph cannot be rebuilt: {type(error).__name__}: {error}") from error
        ring = None
        if self._store is not None and plan.slot_stays:
            ring = self._store.ring(slot_bytes=plan.slot_bytes)
        return Executor(top, plan, ring)

    def run(self, inputs: list[Any]) -> Any:
        """Return the result of the call whose graph inputs are `inputs`."""
        return self.executor(inputs)[self._record.result]


class _StateTensors:
    """Reads the parameters and buffers of a model that a graph takes.

    Since the last call, a tensor may have been replaced or may have new memory, as after `module.half()`. So each call
    compares all of them. Raises ValueError if the model has no tensor at a path, or a tensor with another layout.
    """

    def __init__(self, model: nn.Module, items: Sequence[StateInput]) -> None:
        self._items = items
        # The first path of each tensor; then the other paths of tied tensors, with the index of the first.
        self._paths = [self._path(model, item.paths[0]) for item in items]
        self._tied = [(n, self._path(model, path)) for n, item in enumerate(items) for path in item.paths[1:]]
        self._have_known_layouts: Callable[..., bool] | None = None
        for item, value in zip(items, self._values(), strict=True):
            if not item.layout.holds_for(value, {}):
                raise ValueError(f"{item.paths[0]} of the model has another layout than the stored one")

    def read(self) -> list[torch.Tensor] | None:
        """Return the model's tensors, or None if layouts differ from the record, or ties were broken."""
        values = self._values()
        if self._have_known_layouts is None or not self._have_known_layouts(*values):
            if not all(item.layout.holds_for(value, {}) for item, value in zip(self._items, values, strict=True)):
                return None
            self._have_known_layouts = same_layouts(values)
        if any(_read(path) is not values[first] for first, path in self._tied):
            return None
        return values

    def _values(self) -> list[Any]:
        return [_read(path) for path in self._paths]

    @staticmethod
    def _path(model: nn.Module, path: str) -> _TensorPath:
        prefix, _, name = path.rpartition(".")
        try:
            owner = model.get_submodule(prefix)
        except AttributeError as error:
            raise ValueError(f"the model has no module {prefix}") from error
        return owner, "_parameters" if name in owner._parameters else "_buffers", name


def _read(path: _TensorPath) -> Any:
    owner, kind, name = path
    return getattr(owner, kind).get(name)


def _only_run(watch: CaptureWatch) -> tuple[CompiledGraph, GraphRun]:
    if watch.problem:
        raise NotStorableError(watch.problem)
    if len(watch.graphs) != 1 or len(watch.runs) != 1 or watch.runs[0].executor is not watch.graphs[0].executor:
        raise NotStorableError(
            f"a call makes {len(watch.runs)} runs of {len(watch.graphs)} new graphs, not one run of one graph"
        )
    if watch.frames() != (1, 1):
        # Code outside the graph runs as well, and it may change the result.
        raise NotStorableError("Dynamo does not compile a call as one function")
    graph = watch.graphs[0]
    plan, nodes = graph.executor.plan, graph.captured.graph.nodes
    if plan.local_blocks or plan.dispatch or any(bank.group for bank in plan.banks):
        raise NotStorableError("the graph has expert parallelism, which ranks negotiate anew in every process")
    if writes_to_inputs(graph.captured.graph):
        raise NotStorableError("the graph writes to its inputs")
    if any(is_call(node, BANK_TENSOR) for node in graph.top.graph.nodes):
        raise NotStorableError("the graph reads banks outside of its schedule")
    for size in symbolic_sizes(nodes):
        if any(size.node.shape_env.is_unbacked_symint(symbol) for symbol in size.node.expr.free_symbols):
            raise NotStorableError(f"the size {size} depends on data")
    return graph, watch.runs[0]


def _layout(value: torch.Tensor) -> TensorLayout:
    shape, stride = (tuple(_text(size) for size in sizes) for sizes in (value.shape, value.stride()))
    return TensorLayout(dtype_name(value.dtype), str(value.device), shape, stride)


def _text(size: object) -> str:
    return str(size_expression(size))


def _conditions(graph: Graph) -> tuple[Condition, ...]:
    """Return the conditions on the sizes of `graph` that the shapes of its inputs do not show."""
    env = next((size.node.shape_env for size in symbolic_sizes(graph.nodes)), None)
    if env is None:
        return ()
    conditions = [condition for guard in env.guards for condition in _relations(env.replace(guard.expr))]
    for symbol, bounds in env.var_to_range.items():
        if symbol in env.replacements:
            continue
        if isinstance(bounds.lower, sympy.Integer):
            conditions.append(Condition(str(bounds.lower), "<=", str(symbol)))
        if isinstance(bounds.upper, sympy.Integer):
            conditions.append(Condition(str(symbol), "<=", str(bounds.upper)))
    return tuple(dict.fromkeys(conditions))


def _relations(expression: Any) -> list[Condition]:
    if expression == sympy.true:
        return []
    if isinstance(expression, sympy.And):
        return [condition for term in expression.args for condition in _relations(term)]
    if isinstance(expression, sympy.core.relational.Relational) and expression.rel_op in RELATIONS:
        return [Condition(str(expression.lhs), expression.rel_op, str(expression.rhs))]
    raise NotStorableError(f"the condition {expression} on sizes cannot be recorded")

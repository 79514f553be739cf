"""The top-level graph that runs: slot operations call a ring, and segments name their layers in errors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moepass.models.errors import InputError, MoepassError
from moepass.passes.blocks.detect import bank_arguments
from moepass.passes.graph.nodes import copy_graph_module, is_call
from moepass.passes.graph.source_lines import INPUT_NAME_KEY
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.slot_operations import BANK_TENSOR, EXPERT_STACK, SLOT_OPS, acquire, decode, prefetch, release
from moepass.passes.ir.timeline import COMPUTE
from moepass.runtime.banks.banks import find_bank
from moepass.runtime.banks.stacked_parameters import StackedParameters
from moepass.runtime.cuda_graphs.segment_graphs import SegmentGraphs
from moepass.runtime.execute.run_findings import RunFindings
from moepass.runtime.lowering.boxed_code import TakesList
from moepass.runtime.transfer.recording import current_recording, moment_on
from moepass.runtime.transfer.ring import Ring

MODEL_IS_GONE = "the model of this compiled graph was deleted, and with it the ring of its experts"


class SegmentError(MoepassError, RuntimeError):
    """An exception in a segment. The message names the layers; the cause is the original exception."""


# Each call takes the ring, the graph's banks, and the arguments of the slot operation.
_RING_CALLS: dict[Any, Callable[..., Any]] = {
    prefetch: lambda ring, banks, shards, bank, slot, after: ring.prefetch(shards, banks[bank], slot, after),
    decode: lambda ring, banks, copied, bank, slot, after: ring.decode(copied, banks[bank], slot, after),
    acquire: lambda ring, banks, filled, bank, slot: ring.acquire(filled, banks[bank], slot),
    release: lambda ring, banks, tensors, bank, slot, last: ring.release(slot, last),
}


class RingOperation(torch.nn.Module):
    """A slot operation of the bound graph, which `call` carries out on a ring.

    It refers to the ring weakly: Dynamo keeps compiled code after the model is deleted, and the slots must be freed.
    """

    def __init__(self, ring: Ring, banks: Mapping[int, BankSpec], call: Callable[..., Any]) -> None:
        super().__init__()
        self._ring, self._banks, self._call = weakref.ref(ring), dict(banks), call

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the result of the ring. Raises InputError if it was deleted together with its model."""
        return self._call(living_ring(self._ring), self._banks, *arguments, **keywords)


class ReadTensor(torch.nn.Module):
    """Reads a bank tensor outside the schedule, for a bank whose input is only a shard, or encoded."""

    def __init__(self, bank: BankSpec) -> None:
        super().__init__()
        self.bank = bank

    def forward(self, shard: torch.Tensor, store: int, bank: int, bank_name: str, index: int, *_: Any) -> torch.Tensor:
        """Return the complete tensor number `index` of the bank."""
        match = find_bank(self.bank, [shard])
        if match is None:
            raise InputError(MODEL_IS_GONE)
        owner, spec = match
        return owner.read_tensor(spec, [shard], index)


class SegmentCall(TakesList):
    """One call of a segment. It wraps exceptions in a SegmentError that names the `layers` of this call."""

    def __init__(self, segment: Callable[..., Any], name: str, layers: str) -> None:
        super().__init__()
        self.segment, self.name, self.layers = segment, name, layers

    def forward(self, *inputs: Any) -> Any:
        """Run the segment on `inputs`."""
        return self.run_list(list(inputs))

    def run_list(self, inputs: list[Any]) -> Any:
        """Run the segment on a list of inputs, which is emptied."""
        recording = current_recording()
        if recording is None:
            return self._run(inputs)
        device = device_of(inputs)
        started = moment_on(device)
        outputs = self._run(inputs)
        label = f"{self.name}: {self.layers}" if self.layers else self.name
        recording.add("segment", label, COMPUTE, started, moment_on(device))
        return outputs

    def _run(self, inputs: list[Any]) -> Any:
        try:
            if isinstance(self.segment, TakesList):
                return self.segment.run_list(inputs)
            return self.segment(*inputs)
        except Exception as error:
            layers = f" ({self.layers})" if self.layers else ""
            raise SegmentError(f"in {self.name}{layers}: {type(error).__name__}: {error}", name=self.name) from error


def living_ring(reference: weakref.ref[Ring]) -> Ring:
    """Return the ring of a weak reference. Raises InputError if it was deleted together with its model."""
    ring = reference()
    if ring is None:
        raise InputError(MODEL_IS_GONE)
    return ring


def device_of(values: Sequence[Any]) -> torch.device:
    """Return the device of the first tensor in `values` that is not on the CPU, else the CPU."""
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def bind(
    top: GraphModule,
    banks: Mapping[int, BankSpec],
    ring: Ring | None,
    remark: str = "",
    graphs: SegmentGraphs | None = None,
    findings: RunFindings | None = None,
) -> GraphModule:
    """Return a copy of `top` whose slot operations call `ring` and whose segment calls name their layers.

    Parameters of single experts that are read as one tensor are moved into one memory in their first run. Bank tensors
    that are read outside the schedule, from shards of several ranks, become calls of their store.

    `banks` are the graph's banks by the index that they have in it. `remark` is added to the layers that errors name.
    `graphs` records and replays segments as CUDA graphs. `findings` notes the parameters that are copied in each run
    because they cannot be moved.
    """
    bound = copy_graph_module(top)
    for target, call in _RING_CALLS.items():
        if any(is_call(node, target) for node in bound.graph.nodes):
            assert ring is not None, "a graph with slot operations needs a ring"
            bound.add_module(target.__name__, RingOperation(ring, banks, call))
    last_releases = {node.kwargs["slot"]: node for node in bound.graph.nodes if is_call(node, release)}
    for position, node in enumerate(list(bound.graph.nodes)):
        if is_call(node, release):
            node.kwargs = {**node.kwargs, "last": last_releases[node.kwargs["slot"]] is node}
        if is_call(node, *SLOT_OPS):
            node.op, node.target = "call_module", node.target.__name__
        elif is_call(node, EXPERT_STACK):
            names = [str(parameter.meta.get(INPUT_NAME_KEY) or parameter.name) for parameter in node.all_input_nodes]
            note = None if findings is None else functools.partial(findings.refuse_stack, node.name)
            _call_module(node, node.name, StackedParameters(names, note))
        elif is_call(node, BANK_TENSOR) and not bank_arguments(node).is_complete:
            _call_module(node, f"read_bank_tensor_at_{position}", ReadTensor(banks[bank_arguments(node).bank]))
        elif node.op == "call_module":
            name = str(node.target)
            layers = "; ".join(filter(None, (str(node.meta.get("moepass_layers", "")), remark)))
            call_name = f"{name}_at_{position}"
            segment: Callable[..., Any] = bound.get_submodule(name)
            if graphs is not None:
                segment = graphs.at(call_name, name, segment)
            _call_module(node, call_name, SegmentCall(segment, name, layers))
    bound.graph.lint()
    bound.recompile()
    return bound


def _call_module(node: Node, name: str, module: torch.nn.Module) -> None:
    owner = node.graph.owning_module
    assert owner is not None
    owner.add_module(name, module)
    node.op, node.target = "call_module", name

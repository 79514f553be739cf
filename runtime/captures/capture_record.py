"""One capture as data: a graph that was compiled for a model, and what must hold of a call for it to serve that call.

Dynamo's guards are of two kinds. What the code read of the model and the process is in the key that the capture is
stored under (see `fingerprint`). What it read of the arguments is here: type, device, shape and strides of each, in the
graph's own sizes, and the conditions on these sizes that were found while the graph was traced and compiled.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import torch
from torch import nn

from moepass.models.formulas.text import evaluate_text
from moepass.passes.graph.graph_records import NodeRecord
from moepass.passes.ir.plan import Plan, dtype_name
from moepass.runtime.lowering.segment_records import SegmentRecord

RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# To see whether a text is arithmetic.
ANY_SIZE = 64


class TensorLayout(msgspec.Struct, frozen=True):
    """Sizes and strides are expressions in the graph's sizes."""

    dtype: str
    device: str
    shape: tuple[str, ...]
    stride: tuple[str, ...]

    def holds_for(self, value: object, sizes: Mapping[str, int]) -> bool:
        return (
            type(value) in (torch.Tensor, nn.Parameter)
            and isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and not (value.is_neg() or value.is_conj())  # its memory has other numbers
            and dtype_name(value.dtype) == self.dtype
            and str(value.device) == self.device
            and _are(value.shape, self.shape, sizes)
            and _are(value.stride(), self.stride, sizes)
        )


class StateInput(msgspec.Struct, frozen=True, tag="state"):
    """An input of the graph that is a parameter or a buffer of the model; tied ones have several paths."""

    paths: tuple[str, ...]
    layout: TensorLayout


class ArgumentInput(msgspec.Struct, frozen=True, tag="argument"):
    """An input that is an argument of the call."""

    position: int
    layout: TensorLayout


class SizeInput(msgspec.Struct, frozen=True, tag="size"):
    """An input that is a size, as an expression in those that the arguments show."""

    text: str


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """`left relation right`, of sizes."""

    left: str
    relation: Literal["==", "!=", "<", "<=", ">", ">="]
    right: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        return RELATIONS[self.relation](evaluate_text(self.left, sizes), evaluate_text(self.right, sizes))


class CaptureRecord(msgspec.Struct, frozen=True):
    """`sizes` says by name which dimension of which argument is a size. `result` is the output that the call gave.

    `sources` are the digests of the files of the traced code. `environment` has the variables that this code may read;
    None for those that were not set. `vector_instructions` are those that Inductor compiled for; empty where
    it compiled nothing.
    """

    inputs: tuple[StateInput | ArgumentInput | SizeInput, ...]
    sizes: dict[str, tuple[int, int]]
    conditions: tuple[Condition, ...]
    arguments: int
    result: int
    plan: Plan
    top: tuple[NodeRecord, ...]
    segments: dict[str, SegmentRecord]
    sources: dict[str, str]
    environment: dict[str, str | None]
    vector_instructions: str = ""

    def name(self) -> str:
        """Equal for captures that serve the same calls."""
        served = msgspec.json.encode((self.inputs, self.sizes, self.conditions, self.arguments), order="sorted")
        return hashlib.sha256(served).hexdigest()[:16]

    def check(self) -> None:
        """Raises ValueError for values that no recorded call has. It needs no more than the record."""
        given = [item for item in self.inputs if isinstance(item, ArgumentInput)]
        ranks = {item.position: len(item.layout.shape) for item in given}
        if len(ranks) != self.arguments or not all(0 <= place < len(ranks) for place in ranks):
            raise ValueError(f"its inputs are the arguments {sorted(ranks)} of {self.arguments}")
        if not all(item.paths for item in self.inputs if isinstance(item, StateInput)):
            raise ValueError("an input is a tensor of the model without a path")
        for name, (place, dim) in self.sizes.items():
            if not 0 <= dim < ranks.get(place, 0):
                raise ValueError(f"its size {name} is dimension {dim} of argument {place}, which does not exist")
        for text in size_texts(self.inputs, self.conditions):
            evaluate_text(text, dict.fromkeys(self.sizes, ANY_SIZE))


def size_texts(inputs: Iterable[object], conditions: Iterable[Condition]) -> Iterator[str]:
    """All expressions of sizes in a record."""
    for condition in conditions:
        yield from (condition.left, condition.right)
    for item in inputs:
        if isinstance(item, SizeInput):
            yield item.text
        elif isinstance(item, (StateInput, ArgumentInput)):
            yield from (*item.layout.shape, *item.layout.stride)


def _are(values: Sequence[int], texts: Sequence[str], sizes: Mapping[str, int]) -> bool:
    return len(values) == len(texts) and all(
        value == (int(text) if text.isdigit() else evaluate_text(text, sizes))
        for value, text in zip(values, texts, strict=True)
    )

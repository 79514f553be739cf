"""A capture as data: a compiled graph, and the conditions under which it serves a call.

Dynamo has guards on two kinds of values. Those on the model and the process are part of the key that the capture is
stored under (see `fingerprint`). Those on the arguments are recorded here: dtype, device, shape and strides of each
argument, in the graph's own sizes, and the conditions on these sizes that tracing and compilation added.
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
# A size for checks that a text is arithmetic.
ANY_SIZE = 64


class TensorLayout(msgspec.Struct, frozen=True):
    """The layout that a tensor must have. Sizes and strides are expressions in the graph's sizes."""

    dtype: str
    device: str
    shape: tuple[str, ...]
    stride: tuple[str, ...]

    def holds_for(self, value: object, sizes: Mapping[str, int]) -> bool:
        """Return whether `value` is a plain tensor of this layout, for these sizes of the graph."""
        return (
            type(value) in (torch.Tensor, nn.Parameter)
            and isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and not (value.is_neg() or value.is_conj())  # its memory has different numbers
            and dtype_name(value.dtype) == self.dtype
            and str(value.device) == self.device
            and _are(value.shape, self.shape, sizes)
            and _are(value.stride(), self.stride, sizes)
        )


class StateInput(msgspec.Struct, frozen=True, tag="state"):
    """An input of the graph that is a parameter or a buffer of the model; a tied tensor has several paths."""

    paths: tuple[str, ...]
    layout: TensorLayout


class ArgumentInput(msgspec.Struct, frozen=True, tag="argument"):
    """An input that is an argument of the call."""

    position: int
    layout: TensorLayout


class SizeInput(msgspec.Struct, frozen=True, tag="size"):
    """An input that is a size, as an expression in the sizes of the arguments."""

    text: str


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """A condition `left relation right` on sizes."""

    left: str
    relation: Literal["==", "!=", "<", "<=", ">", ">="]
    right: str

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the condition holds for these sizes."""
        return RELATIONS[self.relation](evaluate_text(self.left, sizes), evaluate_text(self.right, sizes))


class CaptureRecord(msgspec.Struct, frozen=True):
    """A compiled graph as it is stored, from which a later process restores it.

    Raises ValueError for positions that no call can have.

    Attributes:
        sizes: the argument and the dimension from which each symbolic size is read.
        result: the position of the graph's output that the call returned.
        sources: digests of the files whose code was traced, by path.
        environment: the environment variables that this code may read; None if a variable is not set.
        vector_instructions: the vector instructions that Inductor compiled for; empty if it compiled nothing.
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

    def __post_init__(self) -> None:
        inputs = [item for item in self.inputs if isinstance(item, ArgumentInput)]
        ranks = {item.position: len(item.layout.shape) for item in inputs}
        if len(ranks) != self.arguments or not all(0 <= position < len(ranks) for position in ranks):
            raise ValueError(f"its inputs are the arguments {sorted(ranks)}, but the call had {self.arguments}")
        if not all(item.paths for item in self.inputs if isinstance(item, StateInput)):
            raise ValueError("one of its inputs is a tensor of the model, but has no path")
        for name, (position, dim) in self.sizes.items():
            if not 0 <= dim < ranks.get(position, 0):
                raise ValueError(f"its size {name} is dimension {dim} of argument {position}, which does not exist")

    def name(self) -> str:
        """Return a name that is equal for captures that serve the same calls."""
        served = msgspec.json.encode((self.inputs, self.sizes, self.conditions, self.arguments), order="sorted")
        return hashlib.sha256(served).hexdigest()[:16]


def size_texts(inputs: Iterable[object], conditions: Iterable[Condition]) -> Iterator[str]:
    """Yield all size expressions of a record."""
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

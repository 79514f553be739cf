"""The segments of a graph: what each computes, which calls share it, and how it was lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moepass.passes.ir.cost import Cost

EMBEDDING, ATTENTION, ROUTER, EXPERTS, DENSE, HEAD = "embedding", "attention", "router", "experts", "dense", "head"
# Role of a segment with none of these parts: norms, sums, permutations, comparisons.
ELEMENTWISE = "elementwise"
# Role of a segment with several of the parts that most of its time may go to.
MIXED = "mixed"
# On a node of a segment: which of the parts it belongs to.
PART_KEY = "moepass_part"
# On nodes that can run some tokens at a time: the number of their region; where tokens lie in what a node gives, also
# of nodes that a region reads (`passes/tokens`); and on slices that leave out no token.
REGION_KEY, TOKENS_KEY, ALL_TOKENS_KEY = "moepass_region", "moepass_tokens", "moepass_all_tokens"
EAGER, INDUCTOR, EXPERT_LOOP, TRITON, TENSORRT = "eager", "inductor", "expert_loop", "triton", "tensorrt"
# What a region wants beside one of these: to run some tokens at a time.
TOKEN_LOOP = "token_loop"
# Lowerings that read weights expert by expert.
BY_EXPERT = (EXPERT_LOOP, TRITON)
_HEAVY = (ATTENTION, EXPERTS, DENSE, HEAD)


@dataclasses.dataclass(frozen=True)
class SegmentUse:
    """One call of a segment. `layers` are the modules in which it begins and ends, `blocks` the MoE blocks whose expert
    GEMMs it runs, by name."""

    layers: str = ""
    blocks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class NotLowered:
    """Why a segment was not lowered as wanted: the node that stands in the way, and the model's line it came from."""

    wanted: str
    node: str
    reason: str
    source_line: str = ""

    def __str__(self) -> str:
        line = f" ({self.source_line})" if self.source_line else ""
        return f"not lowered as {self.wanted}{line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class NotRecorded:
    """Why a segment is no CUDA graph: the node that stands in the way, and the model's line it came from."""

    node: str
    reason: str
    source_line: str = ""

    def __str__(self) -> str:
        line = f" ({self.source_line})" if self.source_line else ""
        return f"no CUDA graph{line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class CudaGraphUse:
    """That calls of a segment become CUDA graphs where shapes repeat; or, with a `refusal`, that they do not."""

    refusal: NotRecorded | None = None


@dataclasses.dataclass(frozen=True)
class TensorrtChoice:
    """Whether a segment is for TensorRT. `stays` says why not, and is empty where it is."""

    stays: str = ""


@dataclasses.dataclass(frozen=True)
class Lowering:
    """How a segment runs.

    `how` is `inductor`, `eager` (the captured operators, one by one), `expert_loop` (expert by expert, the GEMMs by a
    library and the rest by Inductor), `triton` (grouped GEMMs as generated kernels, with the rest in them), or
    `tensorrt` (an engine of TensorRT).
    `refusal` is None where that is what was wanted.

    With `chunk_tokens` it runs at most so many tokens at a time, or as many as a run chooses where the plan's
    activations have `room_bytes`; and `experts` is how the experts in it run, empty where it has none.
    """

    how: str
    refusal: NotLowered | None = None
    chunk_tokens: int | None = None
    experts: str = ""

    @property
    def reads_by_expert(self) -> bool:
        """Whether weights of experts are read expert by expert."""
        return (self.experts if self.chunk_tokens is not None else self.how) in BY_EXPERT


@dataclasses.dataclass(frozen=True)
class Segment:
    """Nodes between two scheduling points, compiled once for all calls that compute the same.

    `name` is that of its module in the top-level graph. `parts` are what it computes, in host order, each once:

        embedding    lookups in the table of token embeddings
        attention    scores and values, and the projections before and after them; also other GEMMs of activations
                     with activations
        router       the GEMM that scores experts, and the choice among them
        experts      GEMMs with expert weights
        head         the GEMM whose result is the graph's output, as that to the vocabulary
        dense        every other GEMM with weights: MLPs, shared experts; convolutions

    `role` is its only part that takes long, `mixed` where it has several, `elementwise` where it has no part at all.
    `cost` is that of one call, in the graph's sizes. `lowering` is None in a plan that was not compiled, and
    `cuda_graph` and `tensorrt` where these were not asked for.
    """

    name: str
    role: str = ELEMENTWISE
    parts: tuple[str, ...] = ()
    uses: tuple[SegmentUse, ...] = ()
    cost: Cost | None = None
    lowering: Lowering | None = None
    cuda_graph: CudaGraphUse | None = None
    tensorrt: TensorrtChoice | None = None


def with_refused_recording(segments: Sequence[Segment], name: str, refusal: NotRecorded) -> tuple[Segment, ...]:
    """`segments`, of which the one called `name` is not recorded."""
    return tuple(
        dataclasses.replace(segment, cuda_graph=CudaGraphUse(refusal)) if segment.name == name else segment
        for segment in segments
    )


def role_of(parts: Sequence[str]) -> str:
    """One word for `parts`."""
    heavy = [part for part in parts if part in _HEAVY]
    if heavy:
        return heavy[0] if len(heavy) == 1 else MIXED
    return next((part for part in (ROUTER, EMBEDDING) if part in parts), ELEMENTWISE)

"""Records of segments: what each computes, which calls share it, and how it was lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moepass.passes.ir.cost import Cost

EMBEDDING, ATTENTION, ROUTER, EXPERTS, DENSE, HEAD = "embedding", "attention", "router", "experts", "dense", "head"
# Role of a segment without any of these parts: norms, sums, permutations, comparisons.
ELEMENTWISE = "elementwise"
# Role of a segment with several expensive parts.
MIXED = "mixed"
# Metadata key of a node: the part to which it belongs.
PART_KEY = "moepass_part"
# Metadata key of the first and of the last GEMM of a block of experts: whether it is the first, and the block's bank.
BLOCK_EDGE_KEY = "moepass_block_edge"
# Metadata keys for regions that can run some tokens at a time (`passes/tokens`): the number of a node's region; the
# token dimensions of a node's result, also for nodes that a region reads; a mark on slices that keep every token.
REGION_KEY, TOKENS_KEY, ALL_TOKENS_KEY = "moepass_region", "moepass_tokens", "moepass_all_tokens"
EAGER, INDUCTOR, EXPERT_LOOP, TRITON, TENSORRT = "eager", "inductor", "expert_loop", "triton", "tensorrt"
# The request of a region to run some tokens at a time, in addition to one of these lowerings.
TOKEN_LOOP = "token_loop"
# Lowerings that read weights expert by expert.
BY_EXPERT = (EXPERT_LOOP, TRITON)
_HEAVY = (ATTENTION, EXPERTS, DENSE, HEAD)


@dataclasses.dataclass(frozen=True)
class SegmentUse:
    """One call of a segment.

    Attributes:
        layers: modules in which the call begins and ends
        blocks: names of the MoE blocks whose expert GEMMs it runs
    """

    layers: str = ""
    blocks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class NotLowered:
    """The reason why a segment was not lowered as requested.

    Attributes:
        wanted: the requested lowering
        node: the node that prevents it
        source_line: its line in the model
    """

    wanted: str
    node: str
    reason: str
    source_line: str = ""

    def __str__(self) -> str:
        line = f" ({self.source_line})" if self.source_line else ""
        return f"not lowered as {self.wanted}{line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class NotRecorded:
    """The reason why a segment is not recorded as a CUDA graph.

    Attributes:
        node: the node that prevents it
        source_line: its line in the model
    """

    node: str
    reason: str
    source_line: str = ""

    def __str__(self) -> str:
        line = f" ({self.source_line})" if self.source_line else ""
        return f"no CUDA graph{line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class CudaGraphUse:
    """The decision to record calls of a segment as CUDA graphs when shapes repeat; a `refusal` says why not."""

    refusal: NotRecorded | None = None


@dataclasses.dataclass(frozen=True)
class TensorrtChoice:
    """The decision whether a segment is for TensorRT; `stays` is empty if it is, else the reason why not."""

    stays: str = ""


@dataclasses.dataclass(frozen=True)
class Lowering:
    """The lowering of a segment.

    Attributes:
        how: `inductor`; `eager` (the captured operators, one by one); `expert_loop` (expert by expert, with GEMMs of a
            library and the remaining operators by Inductor); `triton` (grouped GEMMs as generated kernels, with the
            remaining operators fused into them); or `tensorrt` (a TensorRT engine)
        refusal: why it is not lowered as requested; None if it is
        chunk_tokens: it runs at most this many tokens at a time, or a number that each run chooses if the plan's
            activations have `room_bytes`
        experts: with chunks, how its experts run; empty if it has none
    """

    how: str
    refusal: NotLowered | None = None
    chunk_tokens: int | None = None
    experts: str = ""

    @property
    def reads_by_expert(self) -> bool:
        """True if the segment reads each expert's weights separately, so that a bank can be read in parts."""
        return self.is_by(*BY_EXPERT)

    def is_by(self, *lowerings: str) -> bool:
        """Return whether the segment's experts, or without chunks the segment, run by one of `lowerings`."""
        return (self.experts if self.chunk_tokens is not None else self.how) in lowerings


@dataclasses.dataclass(frozen=True)
class Segment:
    """Nodes between two scheduling points, compiled once for all calls that compute the same.

    Attributes:
        name: name of its module in the top-level graph
        parts: the parts of a model that it computes, in host order, each once:

            embedding    lookups in the table of token embeddings
            attention    scores and values, the projections before and after them, and other GEMMs of two activations
            router       the GEMM that scores experts, and the selection of experts
            experts      GEMMs with expert weights
            head         the GEMM whose result is the graph's output, such as the projection to the vocabulary
            dense        every other GEMM with weights (MLPs, shared experts) and convolutions

        role: its only expensive part; `mixed` if there are several, `elementwise` if it has no part
        cost: cost of one call, in the graph's sizes
        lowering: None in a plan that was not compiled
        cuda_graph, tensorrt: None if these were not requested
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
    """Return `segments` with the one called `name` marked as not recorded."""
    return tuple(
        dataclasses.replace(segment, cuda_graph=CudaGraphUse(refusal)) if segment.name == name else segment
        for segment in segments
    )


def role_of(parts: Sequence[str]) -> str:
    """Return the role of a segment with these parts."""
    heavy = [name for name in parts if name in _HEAVY]
    if heavy:
        return heavy[0] if len(heavy) == 1 else MIXED
    return next((name for name in (ROUTER, EMBEDDING) if name in parts), ELEMENTWISE)

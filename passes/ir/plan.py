"""Records of a plan: the compiler's decisions about one graph, as pure data."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping

import msgspec
import torch

from moepass.models.errors import InputError
from moepass.models.formulas.text import evaluate_text
from moepass.models.layouts.layout import Role
from moepass.models.layouts.weight_layout import Formula
from moepass.passes.ir.activation_memory import ActivationMemory
from moepass.passes.ir.bank_format import BankFormat, ring_bytes
from moepass.passes.ir.cost import Cost
from moepass.passes.ir.planner_decisions import Decisions
from moepass.passes.ir.segment import Segment
from moepass.passes.ir.weight_recipe import WeightRecipe

PLAN_SCHEMA = "moepass.plan/2"
# Leading bytes of a digest that fit into a signed integer of 64 bits.
_DIGEST_BYTES = 7


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of `dtype` without `torch.`, as plans write it."""
    return str(dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Position of one expert tensor in its bank.

    Attributes:
        shape: [experts, ...]
        dtype: torch's name without `torch.`
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch.dtype named by `dtype`."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a view of the tensor in `memory`, flat uint8 bytes in the layout of the bank."""
        return memory.narrow(0, self.offset_bytes, self.nbytes).view(self.torch_dtype).view(self.shape)


@dataclasses.dataclass(frozen=True)
class DecodedPart:
    """Indices [start, stop) of dimension `dim` of a bank's `tensor`, which are decoded from stored tensors.

    Attributes:
        stored: positions in `BankSpec.stored`, by role
        formula: None if the stored values are only converted to the dtype of the tensor
    """

    tensor: TensorSpec
    dim: int
    start: int
    stop: int
    stored: tuple[tuple[Role, int], ...]
    formula: Formula | None = None


@dataclasses.dataclass(frozen=True)
class BankSpec:
    """All expert weights of one MoE layer, packed into one buffer.

    Attributes:
        tensors: layout of the bank in a slot
        expert_bounds: rank r's shard holds the experts [expert_bounds[r], expert_bounds[r + 1]) of every tensor. Empty:
            one shard, the complete bank
        group: process group whose ranks hold the other shards, if this rank's shard consists of parameters of the graph
        in_parts: positions of tensors that a slot holds without this rank's experts. Kernels read these experts in the
            shard, and all others in the slot (see `slot_layout`)
        fp8: positions of matrices [experts, rows, columns] that a slot holds in FP8: values in e4m3, and fp32 scales of
            their blocks (see `slot_layout`)
        one_by_one: positions of tensors whose shard is one parameter [...] per expert. All other tensors are one
            parameter [experts of the rank, ...], unless a recipe computes them
        recipes: how tensors are computed from parameters. Parameters that only recipes read follow all others
        stored: layout of the bank at rest and on the link, if it rests quantised: the tensors of the checkpoint, each
            [experts, ...]. The plan of a graph leaves it out
        parts: how all tensors are decoded from the stored ones
    """

    index: int
    name: str
    home: str
    format: BankFormat
    tensors: tuple[TensorSpec, ...]
    expert_bounds: tuple[int, ...] = ()
    group: str = ""
    in_parts: tuple[int, ...] = ()
    fp8: tuple[int, ...] = ()
    one_by_one: tuple[int, ...] = ()
    recipes: tuple[WeightRecipe, ...] = ()
    stored: tuple[TensorSpec, ...] = ()
    parts: tuple[DecodedPart, ...] = ()

    @property
    def at_rest(self) -> BankSpec:
        """The bank with the tensors that rest and travel; itself if these are the tensors of a slot."""
        if not self.stored:
            return self
        plain = BankFormat.plain(self.format.link_bytes)
        return dataclasses.replace(self, format=plain, tensors=self.stored, stored=(), parts=())


@dataclasses.dataclass(frozen=True)
class MoEBlock:
    """One MoE block of a graph.

    Attributes:
        form: how its expert GEMMs were written: `grouped_mm`, `batched_mm` or `dense_bmm`
        top_k: None if the form computes every expert for every token
        hidden, intermediate: widths of one expert
        bank: index of its bank; None if the weights are ordinary resident tensors
        parallel: form of expert parallelism before the rewrite, such as `all_to_all`; empty for local experts
        cost: cost of its expert GEMMs
    """

    name: str
    form: str
    experts: int
    top_k: int | None
    hidden: int
    intermediate: int
    gated: bool
    dtype: str
    weight_bytes: int
    gemms: tuple[str, ...]
    bank: int | None
    parallel: str = ""
    cost: Cost | None = None


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A part of the graph that was not rewritten and runs unchanged, with the reason.

    Attributes:
        node: name of the node in the graph
        where: path of the module, if known
        source_line: line of the model, such as `moe.py:123, in forward: rows = exchange(...)`
        group: process group whose other ranks must leave the block unchanged too, because it still communicates with
            them. Empty if it does not, or if all ranks know the reason and refuse the block
        crosses_ranks: the block still communicates with other ranks
    """

    node: str
    reason: str
    where: str = ""
    group: str = ""
    source_line: str = ""
    crosses_ranks: bool = False

    def __str__(self) -> str:
        line = f" ({self.source_line})" if self.source_line else ""
        return f"{self.where or self.node}{line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class LocalBlock:
    """A block of expert parallelism that this rank can replace by its local form.

    All ranks compare these fields before any of them replaces the block.

    Attributes:
        experts: digest of everything between a row and its expert's output
        tokens: digest of the computation of tokens, ids and weights, if these must be equal on all ranks; else empty
        weights: types and shapes of the expert weights of all ranks together
    """

    name: str
    form: str
    group: str
    experts: str
    tokens: str = ""
    weights: str = ""

    @property
    def signature(self) -> str:
        """Text that must be equal on all ranks."""
        return f"{self.experts} {self.tokens}"


@dataclasses.dataclass(frozen=True)
class SlotStay:
    """One stay of a bank in a slot.

    Attributes:
        after: position in `Plan.slot_stays` of the stay whose release must precede this prefetch; None for a fresh slot
        shards: graph inputs from which the bank is copied
    """

    block: str
    bank: int
    slot: int
    after: int | None
    shards: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """One line of the schedule, in host order. `op` is a slot operation, or `segment`, which has a cost."""

    op: str
    name: str
    bank: int | None = None
    slot: int | None = None
    cost: Cost | None = None


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """The rule by which runs exchange tokens, as the captured graph does, instead of gathering weights.

    Attributes:
        crossover_tokens: tokens per rank, averaged over ranks, below which a run exchanges tokens
        hysteresis: the form changes only if the average passes the crossover by more than this fraction of it
        tokens: this rank's tokens in a block, as an expression in the graph's sizes
        reason: the source of the crossover, in one sentence
        is_estimated: estimated from this graph. Ranks and shapes may have different crossovers, so the average of
            tokens / crossover decides
    """

    crossover_tokens: int
    hysteresis: float
    tokens: str
    reason: str
    is_estimated: bool = False


@dataclasses.dataclass(frozen=True)
class GatherSignature:
    """Numbers of gathers and slots of a run, and a digest of the order in which banks enter slots."""

    digest: int = 0
    gathers: int = 0
    slots: int = 0

    def __str__(self) -> str:
        return f"{self.gathers} gathers through {self.slots} slots"


# Signature of a rank without a plan, as in eager mode or in a gather-only step.
NO_GATHER_SIGNATURE = GatherSignature()


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compiler's decisions about one graph. Pure data, and the only source of each number in it.

    Attributes:
        cost: cost of the complete graph, in its sizes
        sizes: the graph's sizes by name, with their values at capture
        uncosted: operators of unknown cost, of which only the memory traffic counts
        dtype: dtype of the computation outside blocks; empty if unknown
        dispatch: None if every run follows the schedule
        replicated: inputs of the graph that must be equal on all ranks
        sequences: the number of sequences and the tokens of each, as expressions in the graph's sizes; empty if no
            input has these dimensions
        activations: memory that a run holds at once
        decisions: decisions of the planner, for the sizes at capture
    """

    schema: str = PLAN_SCHEMA
    strategy: str = "resident"
    reason: str = "not planned yet"
    blocks: tuple[MoEBlock, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    local_blocks: tuple[LocalBlock, ...] = ()
    replicated: tuple[str, ...] = ()
    banks: tuple[BankSpec, ...] = ()
    slots: int = 0
    slot_bytes: int = 0
    slot_stays: tuple[SlotStay, ...] = ()
    steps: tuple[Step, ...] = ()
    segments: tuple[Segment, ...] = ()
    cost: Cost | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    uncosted: tuple[str, ...] = ()
    dtype: str = ""
    dispatch: Dispatch | None = None
    sequences: tuple[str, ...] = ()
    activations: ActivationMemory | None = None
    decisions: Decisions | None = None

    def to_json(self) -> str:
        """Return the plan as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Read a plan. Raises msgspec.ValidationError if `text` is not a plan of this schema."""
        plan = msgspec.json.decode(text, type=Plan)
        if plan.schema != PLAN_SCHEMA:
            raise msgspec.ValidationError(f"schema is {plan.schema!r}, this version reads {PLAN_SCHEMA!r}")
        return plan

    def digest(self) -> str:
        """Return the plan's part of a cache key, which is equal in all processes exactly if the plans are equal."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def gathers(self) -> GatherSignature:
        """Return the part of the plan that ranks compare before they gather together.

        Banks count by their order only, because layers that share code share a plan.
        """
        order = {bank: number for number, bank in enumerate(dict.fromkeys(stay.bank for stay in self.slot_stays))}
        stays = [(order[stay.bank], stay.slot, stay.after) for stay in self.slot_stays]
        digest = hashlib.sha256(repr((self.strategy, self.slots, stays)).encode()).digest()
        return GatherSignature(int.from_bytes(digest[:_DIGEST_BYTES], "big"), len(stays), self.slots)

    def sequence_counts(self, sizes: Mapping[str, float]) -> tuple[int, int] | None:
        """Return the number of sequences and the tokens of each; None if the sizes do not determine them."""
        if not self.sequences:
            return None
        try:
            batch, sequence = (int(evaluate_text(text, sizes)) for text in self.sequences)
        except InputError:  # a data-dependent size
            return None
        return (batch, sequence) if batch > 0 and sequence > 0 else None

    def largest_activations(self, sizes: Mapping[str, float]) -> tuple[float, str]:
        """Return the peak bytes of activations for these sizes, and the operation that runs then.

        Raises InputError if a size is missing or negative, and ValueError if pass activation_memory did not run.
        """
        if self.activations is None:
            raise ValueError("the plan has no activation memory, because pass activation_memory is disabled")
        counts, chunk = self.sequence_counts(sizes), None
        if self.activations.room_bytes is not None:
            chunk, _ = self.activations.chosen_chunk_tokens(sizes, counts)
        return self.activations.largest(sizes, counts, chunk)

    def bank(self, index: int) -> BankSpec:
        """Return the bank with this index. Raises KeyError if the graph has none."""
        for spec in self.banks:
            if spec.index == index:
                return spec
        raise KeyError(f"bank {index} is not in this plan, which has {[spec.index for spec in self.banks]}")

    @property
    def distinct_segments(self) -> int:
        """Number of compiled segments; calls of equal segments count once."""
        return len(self.segments)

    @property
    def encoded_buffer_bytes(self) -> int:
        """Bytes of each encoded buffer of the ring: the largest encoded bank on the link; 0 without encoded banks."""
        return max((self.bank(stay.bank).format.encoded_bytes for stay in self.slot_stays), default=0)

    @property
    def device_bank_bytes(self) -> int:
        """Bytes of streamed banks on the compute device: the ring, independent of the number of layers."""
        return ring_bytes(self.slots, self.slot_bytes, self.encoded_buffer_bytes)

"""The records of a plan: what the compiler decided about one graph, as pure data."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping

import msgspec
import torch

from moepass.models.errors import InputError
from moepass.models.formulas.text import evaluate_text
from moepass.passes.ir.activation_memory import ActivationMemory
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.cost import Cost
from moepass.passes.ir.decisions import Decisions
from moepass.passes.ir.segment import Segment
from moepass.passes.ir.weight_recipe import WeightRecipe

PLAN_SCHEMA = "moepass.plan/2"
# As many of a digest as fit a signed integer of 64 bits.
_DIGEST_BYTES = 7


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as the plan writes it: torch's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Place of one expert tensor in its bank. `shape` is [experts, ...]; `dtype` is torch's name without `torch.`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in `memory`, flat uint8 bytes laid out like the bank."""
        return memory.narrow(0, self.offset_bytes, self.nbytes).view(self.torch_dtype).view(self.shape)


@dataclasses.dataclass(frozen=True)
class BankSpec:
    """All expert weights of one MoE layer, packed into one buffer; `tensors` are views of it, as it is in a slot.

    Rank r's shard holds the experts [expert_bounds[r], expert_bounds[r + 1]) of every tensor; without bounds there is
    one shard, the complete bank. Where this rank's shard consists of parameters of the graph itself, `group` is the
    process group of the ranks that have the others.

    `one_by_one` are positions of tensors of which this rank's shard comes as one parameter [..] for each of its
    experts; all others come as one [experts of the rank, ..], but for those that `recipes` make of parameters. These
    may read any parameters, which stand behind the others where they are nothing else.

    `in_parts` are positions of tensors that a slot holds without this rank's experts: whoever reads these reads them
    where they rest, and the others in the slot. See `slot_layout`.
    """

    index: int
    name: str
    home: str
    format: BankFormat
    tensors: tuple[TensorSpec, ...]
    expert_bounds: tuple[int, ...] = ()
    group: str = ""
    in_parts: tuple[int, ...] = ()
    one_by_one: tuple[int, ...] = ()
    recipes: tuple[WeightRecipe, ...] = ()


@dataclasses.dataclass(frozen=True)
class MoEBlock:
    """One MoE block found in a graph.

    `form` is how its expert GEMMs were written: `grouped_mm`, `batched_mm` or `dense_bmm`. `hidden` and
    `intermediate` are widths of one expert. `top_k` is None where the form computes every expert for every token.
    `bank` is None where the weights are ordinary resident tensors. `parallel` is the form of expert parallelism that
    the block had, as `all_to_all`; empty where its experts were local from the start. `cost` is that of its expert
    GEMMs.
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
    """Something that was not rewritten: where, and why. It runs unchanged.

    `where` is the path of a module where that is known, `source_line` the line of the model that the node came from, as
    `moe.py:123, in forward: rows = exchange(...)`. `group` names the process group whose other ranks must leave the
    block unchanged too, since it still communicates with them; it is empty if it does not, or if all ranks refuse the
    block for a reason that they all know. `crosses_ranks`: it still communicates with other ranks.
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

    All ranks compare these fields before any of them does. `experts` is a digest of everything between a row and its
    expert's output. `tokens` is a digest of how tokens, ids and weights are computed, if they must be the same on all
    ranks, else empty. `weights` are types and shapes of the expert weights of all ranks together. Where only some ranks
    of `group` must have the same tokens as each other, `alike` lists them.
    """

    name: str
    form: str
    group: str
    experts: str
    tokens: str = ""
    weights: str = ""
    alike: tuple[tuple[int, ...], ...] = ()

    @property
    def signature(self) -> str:
        return f"{self.experts} {self.tokens}"


@dataclasses.dataclass(frozen=True)
class SlotStay:
    """One stay of a bank in a slot.

    `after` is the position in `Plan.slot_stays` of the stay whose release must precede this prefetch; None where the
    slot is fresh. `shards` are the graph inputs that the bank is copied from.
    """

    block: str
    bank: int
    slot: int
    after: int | None
    shards: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """One line of the schedule, in host order: `op` is the name of a slot operation, or segment, which has a cost."""

    op: str
    name: str
    bank: int | None = None
    slot: int | None = None
    cost: Cost | None = None


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """When a run exchanges tokens, as the captured graph does, instead of gathering weights.

    It does below `crossover_tokens` tokens per rank, in the mean over ranks; once a form runs, it stays until the mean
    is further from the crossover than the fraction `hysteresis` of it. `tokens` is this rank's number of tokens in a
    block, an expression in the graph's sizes. `reason` says in one sentence where the crossover comes from. Where it
    `is_estimated` from this graph, ranks and shapes may have crossovers of their own: the mean of tokens / crossover
    decides.
    """

    crossover_tokens: int
    hysteresis: float
    tokens: str
    reason: str
    is_estimated: bool = False


@dataclasses.dataclass(frozen=True)
class GatherSignature:
    """Number of gathers and slots of a run, and a digest of which bank enters which slot in which order."""

    digest: int = 0
    gathers: int = 0
    slots: int = 0

    def __str__(self) -> str:
        return f"{self.gathers} gathers through {self.slots} slots"


# Signature of a rank without a plan, as in eager mode or in a gather-only step.
NO_GATHER_SIGNATURE = GatherSignature()


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compiler's decisions about one graph. Pure data: the single source of truth for every number in it.

    `cost` is that of the whole graph, in its sizes; `sizes` are these by name, with the values at capture. Operators
    in `uncosted` count with their memory traffic only, because nobody knows what they compute. `dtype` is what the
    graph computes in outside its blocks; empty where nothing tells. Without `dispatch` every
    run follows the schedule. `replicated` are inputs of the graph that must hold the same on all ranks. `sequences` are
    the number of sequences and the tokens of each, as expressions in the graph's sizes; empty where no input shows
    them. `activations` is what a run holds at once. `decisions` are those of the planner, for the sizes at capture.
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
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Raises msgspec.ValidationError where `text` is not a plan of this schema."""
        plan = msgspec.json.decode(text, type=Plan)
        if plan.schema != PLAN_SCHEMA:
            raise msgspec.ValidationError(f"schema is {plan.schema!r}, this version reads {PLAN_SCHEMA!r}")
        return plan

    def digest(self) -> str:
        """The plan's part of a cache key: equal exactly for equal plans, whatever the process."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def gathers(self) -> GatherSignature:
        """The part of a plan that ranks compare before they gather together.

        Banks count by their order alone, because layers that share code share a plan.
        """
        place = {bank: number for number, bank in enumerate(dict.fromkeys(stay.bank for stay in self.slot_stays))}
        stays = [(place[stay.bank], stay.slot, stay.after) for stay in self.slot_stays]
        digest = hashlib.sha256(repr((self.strategy, self.slots, stays)).encode()).digest()
        return GatherSignature(int.from_bytes(digest[:_DIGEST_BYTES], "big"), len(stays), self.slots)

    def sequence_counts(self, sizes: Mapping[str, float]) -> tuple[int, int] | None:
        """The number of sequences and the tokens of each; None where the sizes do not tell."""
        if not self.sequences:
            return None
        try:
            batch, sequence = (int(evaluate_text(text, sizes)) for text in self.sequences)
        except InputError:  # a size that only a run tells
            return None
        return (batch, sequence) if batch > 0 and sequence > 0 else None

    def largest_activations(self, sizes: Mapping[str, float]) -> tuple[float, str]:
        """The most bytes that activations of a run with these sizes take at once, and in which operation.

        Raises InputError where a size is missing or below 0, ValueError where pass activation_memory did not run.
        """
        if self.activations is None:
            raise ValueError("the plan has no activations: pass activation_memory is disabled")
        counts, chunk = self.sequence_counts(sizes), None
        if self.activations.room_bytes is not None:
            chunk, _ = self.activations.chosen_chunk_tokens(sizes, counts)
        return self.activations.largest(sizes, counts, chunk)

    def bank(self, index: int) -> BankSpec:
        """Raises KeyError where no bank of this graph has that index."""
        for spec in self.banks:
            if spec.index == index:
                return spec
        raise KeyError(f"bank {index} is not in this plan, which has {[spec.index for spec in self.banks]}")

    @property
    def distinct_segments(self) -> int:
        """How many segments are compiled, however often they are called."""
        return len(self.segments)

    @property
    def encoded_buffer_bytes(self) -> int:
        """Bytes of the ring's encoded buffer: the largest encoded bank on its way; 0 where none is encoded."""
        formats = [self.bank(stay.bank).format for stay in self.slot_stays]
        return max((found.link_bytes for found in formats if found.is_encoded), default=0)

    @property
    def device_bank_bytes(self) -> int:
        """Bytes that streamed banks occupy on the compute device: the ring, whatever the depth."""
        return self.slots * self.slot_bytes + self.encoded_buffer_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes that one run of the graph copies from the homes of its banks."""
        return sum(self.bank(stay.bank).format.link_bytes for stay in self.slot_stays)

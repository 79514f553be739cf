"""Packing of experts while they move to their home: the option `expert_format`.

    encode    each rank packs its own experts of every layer, so that the planner knows their bytes
    compare   ranks agree on one length of the sections of each parameter, because experts are stacked
    move      the packed tensors move in place of the parameters, as if a checkpoint stored them (stored_bank.py)

So all packed experts are in memory before the first bank moves.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping

import torch

from moepass.models.checkpoint.unread_tensors import UnreadTensor
from moepass.models.checkpoint.weight_recipes import Decoded, InMemory, Recipe
from moepass.models.errors import OptionError, one_of
from moepass.models.formulas.expert_placement import shard_bounds
from moepass.models.homes import home_named
from moepass.models.layouts.published import PACKED_NUMBERS, PackedFormat, packed_formulas, packed_layout
from moepass.models.layouts.weight_layout import PackedMatrixFormula
from moepass.models.limits import STORED
from moepass.runtime.banks.stored_bank import stored_bank
from moepass.runtime.homes.peer_home import weights_digest
from moepass.runtime.kernels.encoders import EncodedMatrices, encode_matrices
from moepass.runtime.ranks.agree import Topic
from moepass.runtime.ranks.rendezvous import Rendezvous

logger = logging.getLogger("moepass")

_FORMATS = (STORED, *PACKED_NUMBERS)
_LENGTHS = "length of its packed experts"

# Tensors [experts, ...] of each bank by their names, by the path of the bank.
Banks = Mapping[str, Mapping[str, torch.Tensor]]


def check_format(expert_format: str, home: str) -> None:
    """Raise OptionError for an unknown `expert_format`, and for one that experts at `home` cannot be packed in."""
    if expert_format not in _FORMATS:
        raise OptionError.unknown("expert_format", expert_format, _FORMATS)
    if expert_format != STORED and home_named(home).is_in_files:
        text = (
            f"expert_format is {expert_format!r}, but with home={home!r} experts are read from the checkpoint's files "
            "as they are stored; write a packed copy with `moepass pack`, and load that"
        )
        raise OptionError(text, name="expert_format", value=expert_format, expected=(STORED,))


def format_topic(expert_format: str) -> Topic:
    """Return the topic that ranks compare first, because later ones depend on it."""
    return Topic("expert_format", expert_format, "give every rank the same expert_format")


def pack_experts(
    banks: Banks, format: PackedFormat, meeting: Rendezvous | None
) -> dict[str, Mapping[str, torch.Tensor]]:
    """Return those `banks` that packing makes smaller, with their tensors packed.

    A rank of `meeting` packs only its own experts, and all ranks call this. Raises OptionError if experts are quantised
    or packed already, or have a dtype that `format` does not take.
    """
    packer = _ExpertPacker(format, *((0, 1) if meeting is None else (meeting.rank, meeting.size)))
    for path, tensors in banks.items():
        packer.check(path, tensors)
    encoded = {path: packer.encoded(tensors) for path, tensors in banks.items()}
    lengths = {f"{path}.{name}": item.section_bytes for path, items in encoded.items() for name, item in items.items()}
    if meeting is not None:
        records = [record for _, record in meeting.exchange(_LENGTHS, lengths, dict[str, int])]
        lengths = {key: max(record.get(key, 0) for record in records) for key in lengths}
    packed: dict[str, Mapping[str, torch.Tensor]] = {}
    for path, tensors in banks.items():
        own_lengths = {name: lengths[f"{path}.{name}"] for name in encoded[path]}
        if smaller := packer.packed(tensors, encoded.pop(path), own_lengths):
            packed[path] = smaller
    if len(packed) < len(banks):
        logger.warning(
            "the experts of %d of %d layers stay as they are stored, because they would not become smaller in "
            "expert_format %r",
            len(banks) - len(packed),
            len(banks),
            format,
        )
    return packed


@dataclasses.dataclass(frozen=True)
class _ExpertPacker:
    """The packing of the experts of `rank`, one of `ranks`, in `format`."""

    format: PackedFormat
    rank: int
    ranks: int

    @functools.cached_property
    def formulas(self) -> Mapping[torch.dtype, PackedMatrixFormula]:
        """The formulas that pack, by the dtype of matrices."""
        return packed_formulas(self.format)

    def check(self, path: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise OptionError if the bank `path` cannot be packed."""
        stored = stored_bank(tensors)
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.dim() == 3}
        if stored is not None:
            problem = f"the experts of {path} are stored as {stored.name}, and stay so; leave the option out"
        elif dtypes.isdisjoint(self.formulas):
            problem = f"it packs {one_of(self.formulas)}, and the experts of {path} are {one_of(dtypes)}"
        else:
            return
        text = f"expert_format is {self.format!r}, but {problem}"
        raise OptionError(text, name="expert_format", value=self.format, expected=(STORED,))

    def encoded(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, EncodedMatrices]:
        """Return the own matrices of a bank, packed, by the name of the parameter."""
        encoded = {}
        for name, tensor in tensors.items():
            if tensor.dim() == 3 and tensor.dtype in self.formulas:
                experts = tensor.detach()[self._own(tensor)]
                count, rows, columns = experts.shape
                encoded[name] = encode_matrices(self.formulas[tensor.dtype], _matrices(experts), (count, rows, columns))
        return encoded

    def packed(
        self,
        tensors: Mapping[str, torch.Tensor],
        encoded: Mapping[str, EncodedMatrices],
        section_bytes: Mapping[str, int],
    ) -> dict[str, torch.Tensor]:
        """Return a bank with those matrices of `encoded` that became smaller; {} if none did.

        Their sections have these lengths.
        """
        # Ranks compare this, and no rank has packed the experts of others.
        origin = weights_digest(tensors)
        recipes: dict[str, Recipe] = {}
        for name, matrices in encoded.items():
            tensor, formula = tensors[name], self.formulas[tensors[name].dtype]
            numbers = tensor[:1].numel()
            if numbers * formula.type.value_bytes + section_bytes[name] < numbers * tensor.dtype.itemsize:
                parts = {
                    role: self._in_memory(values, tensor, origin)
                    for role, values in matrices.stored(section_bytes[name]).items()
                }
                layout = packed_layout(self.format, formula.number)
                recipes[name] = Decoded(layout, parts, tuple(tensor.shape), tensor.dtype)
        if not recipes:
            return {}
        for name, tensor in tensors.items():
            if name not in recipes:
                recipes[name] = self._in_memory(_copied(tensor.detach()[self._own(tensor)]), tensor, origin)
        return {name: UnreadTensor(recipes[name]) for name in tensors}

    def _own(self, tensor: torch.Tensor) -> slice:
        """Return the own experts of a `tensor` [experts, ...]."""
        bounds = shard_bounds(len(tensor), self.ranks)
        return slice(bounds[self.rank], bounds[self.rank + 1])

    def _in_memory(self, values: torch.Tensor, tensor: torch.Tensor, origin: str) -> InMemory:
        """Return the recipe of a tensor with `values` for the own experts of `tensor`."""
        return InMemory(values, self._own(tensor).start, (len(tensor), *values.shape[1:]), origin)


def _matrices(experts: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the matrix of each expert, contiguous and in host memory."""
    for expert in range(len(experts)):
        yield _copied(experts[expert : expert + 1])[0]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)

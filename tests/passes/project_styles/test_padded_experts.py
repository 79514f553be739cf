"""Rows that are padded for each expert: supported methods, and similar code that is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.graphs.simulated_ranks import (
    Captured,
)
from tests.helpers.project_styles.padded_style import (
    Experts,
    PaddedLayer,
    Padding,
    SearchedTable,
)
from tests.helpers.project_styles.style_layers import SIZES, capture_layer, eliminate_readably

OWN = 4  # experts of each of two ranks


class RoundedBy(Padding):
    """A method that places rows in zeros: `rounded` returns the rows of each expert with padding, `room` the total."""

    def rounded(self, counts: torch.Tensor) -> torch.Tensor:
        return (counts + 7) // 8 * 8

    def room(self, number: int, padded: torch.Tensor) -> int:
        return number + OWN * 8

    def starts(self, padded: torch.Tensor) -> torch.Tensor:
        return padded.cumsum(0) - padded

    def places(self, rows: torch.Tensor, counts: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        shift = self.starts(padded) - (counts.cumsum(0) - counts)
        every = torch.arange(rows.shape[0], device=rows.device)
        return every + shift.repeat_interleave(counts, output_size=rows.shape[0])

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        padded = self.rounded(counts)
        position = self.places(rows, counts, padded)
        laid = rows.new_zeros((self.room(rows.shape[0], padded), rows.shape[1]))
        laid[position] = rows
        return self.read(experts(laid, padded), position)

    def read(self, outputs: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return outputs[position]


# -------------------------------------------------------------------------------------------------- supported padding


class LastBits(RoundedBy):
    def rounded(self, counts: torch.Tensor) -> torch.Tensor:
        return (counts + 15) & -16

    def room(self, number: int, padded: torch.Tensor) -> int:
        return (number + OWN * 15 + 7) // 8 * 8


class NegativeQuotient(RoundedBy):
    def rounded(self, counts: torch.Tensor) -> torch.Tensor:
        return -(-counts // 8) * 8


class Int32(RoundedBy):
    def rounded(self, counts: torch.Tensor) -> torch.Tensor:
        return (torch.div(counts.int() + 7, 8, rounding_mode="trunc") * 8).clamp(min=8)


class LeastRoom(RoundedBy):
    def room(self, number: int, padded: torch.Tensor) -> int:
        return number + OWN * 7


class RoomForAll(RoundedBy):
    """Every expert has room for all rows."""

    def rounded(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.clamp_min(counts, 64)

    def room(self, number: int, padded: torch.Tensor) -> int:
        return number + 64 * OWN


class RoomByHost(SearchedTable):
    """A table whose length is read by the host."""

    def places(self, number: int, padded: torch.Tensor) -> int:
        total = int(padded.cumsum(0)[-1].item())
        torch._check(total >= 0)
        return total


class SumByHost(SearchedTable):
    def places(self, number: int, padded: torch.Tensor) -> int:
        total = int(padded.sum().item())
        torch._check(total >= 0)
        return total


# -------------------------------------------------------------------------------------------------- refused padding


class TooLittleRoom(SearchedTable):
    """A table that is too short if many experts have padding, so rows are lost."""

    def places(self, number: int, padded: torch.Tensor) -> int:
        return number + 2 * self.align


class RoomOfFixedSize(RoundedBy):
    def room(self, number: int, padded: torch.Tensor) -> int:
        return 64 * OWN


class RoundedDown(RoundedBy):
    def rounded(self, counts: torch.Tensor) -> torch.Tensor:
        return counts // 8 * 8


class RoundedUpToSomeNumber(RoundedBy):
    """This is right for up to 4096 rows of an expert."""

    def rounded(self, counts: torch.Tensor) -> torch.Tensor:
        return ((counts + 7) // 8 * 8).clamp(max=4096)


class OtherStarts(RoundedBy):
    """Rows are placed in steps of 8, and computed in steps of 16."""

    def rounded(self, counts: torch.Tensor) -> torch.Tensor:
        return (counts + 15) // 16 * 16

    def room(self, number: int, padded: torch.Tensor) -> int:
        return number + OWN * 16

    def starts(self, padded: torch.Tensor) -> torch.Tensor:
        eighths = padded - 8
        return eighths.cumsum(0) - eighths


class ReadsPadding(RoundedBy):
    """Each row reads the result of the next position, which is padding for the last row of an expert."""

    def read(self, outputs: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return outputs[position + 1]


class ReadsBeyondTheLastOffset(RoundedBy):
    """A layer that adds 0 times unwritten memory."""

    def read(self, outputs: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return outputs[position] + outputs[-1:] * 0


class DependsOnTheAmount(RoundedBy):
    """A layer that is right unless two experts with different numbers of rows have the same number with padding."""

    def places(self, rows: torch.Tensor, counts: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        is_alike = (padded[0] == padded[1]) & (counts[0] != counts[1])
        return super().places(rows, counts, padded) + is_alike.long()


class FloatQuotient(RoundedBy):
    def rounded(self, counts: torch.Tensor) -> torch.Tensor:
        return (torch.ceil(counts.to(torch.bfloat16) / 8) * 8).long()


class GrowsWithRows(RoundedBy):
    """Padding grows by a row for every 4096 rows, which exceeds the memory in the end."""

    def rounded(self, counts: torch.Tensor) -> torch.Tensor:
        return (counts + 7) // 8 * 8 + counts // 4096 * 8


def captured_padding(padding: Padding, rank: int) -> Captured:
    def layer(group: ProcessGroup) -> nn.Module:
        padded = PaddedLayer(SIZES, group)
        padded.padding = padding
        return padded

    return capture_layer(layer, rank, 2)


@pytest.mark.slow
@pytest.mark.parametrize("padding", [LastBits, NegativeQuotient, Int32, LeastRoom, RoomForAll, RoomByHost, SumByHost])
def test_further_padding_methods_are_taken(padding: type[Padding]) -> None:
    captured = [captured_padding(padding(), rank) for rank in range(2)]
    results = [eliminate_readably(rank) for rank in captured]
    for result in results:
        assert [block.form for block in result.plan.local_blocks] == ["all_to_all"], result.plan.refusals
        assert collective_kinds(result) == []
    check_same_outputs(captured, results, [(9, 4), (0, 3), (40, 61)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("padding", "reason"),
    [
        (TooLittleRoom, "a GEMM of 314 rows has the offsets"),
        (RoomOfFixedSize, "looks up places that grow in 256"),
        (RoundedDown, "constant 8"),
        (RoundedUpToSomeNumber, "bounds a place or a size by the constant 4096"),
        (OtherStarts, "meets the constant 8"),
        (ReadsPadding, "other outputs than its experts'"),
        (ReadsBeyondTheLastOffset, "other outputs than its experts'"),
        (DependsOnTheAmount, "other outputs than its experts'"),
        (FloatQuotient, "bfloat16, which does not hold all of them exactly"),
        (GrowsWithRows, "constant 4096"),
    ],
)
def test_wrong_padding_is_refused(padding: type[Padding], reason: str) -> None:
    result = eliminate_readably(captured_padding(padding(), 1))
    assert not result.plan.banks
    assert any(reason in refusal.reason for refusal in result.refusals), [str(refusal) for refusal in result.refusals]

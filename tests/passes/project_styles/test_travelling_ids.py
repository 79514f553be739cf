"""Expert ids that are exchanged with the rows; similar code with another meaning is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.graphs.simulated_ranks import Captured
from tests.helpers.project_styles.ids_style import GlobalIdsTravel
from tests.helpers.project_styles.style_layers import SIZES, capture_layer, eliminate_readably

Change = Callable[[torch.Tensor], torch.Tensor]


class Changed(GlobalIdsTravel):
    """A layer that changes the ids before or after their exchange, or the counts."""

    sent: Change = staticmethod(lambda ids: ids)
    arrived: Change = staticmethod(lambda ids: ids)
    counted: Change = staticmethod(lambda counts: counts)
    rows: Change = staticmethod(lambda rows: rows)

    def _exchange(self, values: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        if values.is_floating_point():
            return self.rows(super()._exchange(values, send, receive))
        return self.arrived(super()._exchange(self.sent(values), send, receive))

    def _exchange_sizes(self, counts: torch.Tensor) -> tuple[list[int], list[int]]:
        return super()._exchange_sizes(self.counted(counts))


def _checked(rows: torch.Tensor) -> torch.Tensor:
    torch._assert_async((rows < 1e6).all(), "rows are too large")
    return rows


class EveryExpertIsAnother(Changed):
    """A layer that sends other ids than the router's, each of an expert on the same rank: it is right, and taken."""

    sent = staticmethod(lambda ids: torch.where(ids < 4, 3, 11) + ids * -1)


class ReceiverShifts(Changed):
    arrived = staticmethod(lambda ids: (ids // 4 * 4) + (ids + 1) % 4)


class ReceiverAssumesOrder(Changed):
    arrived = staticmethod(lambda ids: ids.sort().values)


class ReceiverLimits(Changed):
    arrived = staticmethod(lambda ids: ids.clamp(max=torch.arange(ids.shape[0], device=ids.device) // 500 * 8 + 6))


class IdsOfAnotherRank(Changed):
    sent = staticmethod(lambda ids: (ids + 1) % 8)


class CountsOfOthers(Changed):
    counted = staticmethod(lambda counts: counts.flip(0))


class ChecksRows(Changed):
    rows = staticmethod(_checked)


def captured_layer(layer: type[GlobalIdsTravel], rank: int) -> Captured:
    return capture_layer(functools.partial(layer, SIZES), rank, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (ReceiverShifts, "other outputs than its experts'"),
        (ReceiverAssumesOrder, "other outputs than its experts'"),
        (ReceiverLimits, "constant"),
        (IdsOfAnotherRank, "ids to ranks without them"),
        (CountsOfOthers, "ids to ranks without them"),
        (ChecksRows, "is also read by"),
    ],
)
def test_ids_with_another_meaning_are_refused(layer: type[GlobalIdsTravel], reason: str) -> None:
    result = eliminate_readably(captured_layer(layer, 1))
    assert not result.plan.banks
    assert any(reason in refusal.reason for refusal in result.refusals), [str(refusal) for refusal in result.refusals]


@pytest.mark.slow
def test_the_expert_of_a_row_is_the_one_that_is_sent() -> None:
    captured = [captured_layer(EveryExpertIsAnother, rank) for rank in range(2)]
    results = [eliminate_readably(rank) for rank in captured]
    assert [collective_kinds(result) for result in results] == [[], []]
    check_same_outputs(captured, results, [(5, 6)])


@pytest.mark.slow
def test_ranks_that_send_other_numbers_have_other_signatures() -> None:
    """Each rank's graph is right by itself, but the signatures of their blocks differ."""

    class OwnNumbers(Changed):
        sent = staticmethod(lambda ids: ids % 4)
        arrived = staticmethod(lambda ids: ids + 4)

    layers = (GlobalIdsTravel, OwnNumbers)
    signatures = [
        [block.signature for block in eliminate_readably(captured_layer(layer, 1)).plan.local_blocks]
        for layer in layers
    ]
    assert all(len(blocks) == 1 for blocks in signatures)
    assert signatures[0] != signatures[1]

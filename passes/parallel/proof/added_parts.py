"""Play the ranks that hold the other parts of the same experts in a mock run, and add up results with this rank.

Contract
    each of these ranks is sent as many rows of each expert, from ranks with the same places on the other axis, so a row
    has the same place in what each of them adds up: among rows in the order in which they came, or sorted by expert.
    Which of the two, all ranks say the same (`PartsOfExperts.by_expert`). The rows themselves may differ
    the sum goes back in the place of each row's output; of the rank's own rows it is that of its peers on both axes

What the others add differs from row to row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.passes.graph.collectives import Collective
from moepass.passes.parallel.mock.mock_run import MockRun
from moepass.passes.parallel.proof.demands import IN_ANOTHER_ORDER, demand, equal
from moepass.passes.parallel.proof.sent_rows import SentRows, by_expert, expert_outputs


class AddedParts:
    """What other ranks add for `own` rows, and for those of `peers`."""

    def __init__(self, run: MockRun, own: SentRows, peers: Sequence[SentRows]) -> None:
        assert run.block.cut is not None
        self._cut = run.block.cut
        self._peers = peers
        self._own_part = expert_outputs(run, [own])
        self._parts = [expert_outputs(run, [part]) for part in peers]
        self._own_added = _added(run, own)
        self._added = [_added(run, part) for part in peers]

    def own_sums(self) -> torch.Tensor:
        return self._own_part + self._own_added

    def sums_of_peers(self) -> torch.Tensor:
        """In the order in which rows came."""
        return torch.cat(self._parts) + torch.cat(self._added)

    def answer_in_block(self, collective: Collective, sent: torch.Tensor) -> torch.Tensor:
        parts, added = (self._in_order(values) for values in (self._parts, self._added))
        demand(
            equal(sent.reshape(-1, sent.shape[-1]), parts),
            f"it adds up with ranks that hold other parts of its experts other rows, {IN_ANOTHER_ORDER}",
        )
        return sent + added.reshape(sent.shape)

    def answer_in_local_form(
        self, collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        demand(collective.group_name == self._cut.sum.group_name, "its local form adds up over other ranks")
        demand(equal(sent, self._own_part), "its local form adds up something else")
        return sent + self._own_added

    def _in_order(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return by_expert(self._peers, values) if self._cut.by_expert else torch.cat(list(values))


def _added(run: MockRun, part: SentRows) -> torch.Tensor:
    return run.random_rows(len(part.rows), run.mock.widths[-1][1])

"""Variants of the reference experts that count differently, or that change only large numbers or many tokens."""

from __future__ import annotations

import torch

from moepass.models.reference.collectives import exchange_rows, sum_over_ranks
from moepass.models.reference.expert_parallel import AllReduceExperts, AllToAllExperts
from moepass.models.reference.grouped_experts import count_per_expert, sort_by_expert, undo_order, weighted_sum


class OwnSizesExperts(AllToAllExperts):
    """A variant as in torchtitan: counts are exchanged in another shape than the one that sizes are read from."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        ranks, owned = self.placement.ranks, len(self.placement.owned)
        chosen = torch.zeros(len(top_k_index), self.placement.experts, dtype=torch.bool)
        leaving = chosen.scatter(-1, top_k_index, True).sum(dim=0)
        ones = [1] * ranks
        arriving = exchange_rows(leaving.view(ranks, owned), send=ones, receive=ones, group_name=self.group_name)
        send, receive = leaving.view(ranks, owned).sum(dim=1).tolist(), arriving.sum(dim=1).tolist()
        for size in send + receive:
            torch._check(size >= 0)
        _, order = sort_by_expert(top_k_index)
        rows = exchange_rows(hidden_states[order // top_k_index.shape[1]], send, receive, self.group_name)
        rows = self._run_arrived(rows, arriving.view(-1))
        rows = exchange_rows(rows, send=receive, receive=send, group_name=self.group_name)
        return weighted_sum(rows, order, top_k_weights).to(hidden_states.dtype)


class ClampedOutputs(AllToAllExperts):
    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        return super()._run_arrived(rows, arriving).clamp(-2, 2)


class ClampedRows(AllToAllExperts):
    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        return super()._run_arrived(rows.clamp(-6, 6), arriving)


class NoInfinities(AllToAllExperts):
    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(super()._run_arrived(rows, arriving), posinf=0.0)


class HiddenByMagnitude(AllReduceExperts):
    """Large values are set to 0, so the data decides, not the routing."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        rows, order = self.run_some(hidden_states, self.to_local(top_k_index))
        rows = rows.masked_fill(rows > 50, 0.0)
        return sum_over_ranks(weighted_sum(rows, order, top_k_weights), self.group_name)


class ClampedPartialSums(AllReduceExperts):
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        rows, order = self.run_some(hidden_states, self.to_local(top_k_index))
        return sum_over_ranks(weighted_sum(rows.clamp(-2, 2), order, top_k_weights), self.group_name)


def _places(sorted_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the position of each of `sorted_ids` [S] among the pairs of its expert."""
    counts = count_per_expert(sorted_ids, experts)
    return torch.arange(len(sorted_ids)) - (counts.cumsum(0) - counts)[sorted_ids]


class FewRows(AllToAllExperts):
    """An expert computes 64 rows from all ranks together; further rows are zeros."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        owned = len(self.placement.owned)
        ids = torch.arange(owned).repeat(self.placement.ranks).repeat_interleave(arriving, output_size=len(rows))
        sorted_ids, order = sort_by_expert(ids)
        outputs = self.run_groups(rows[order], count_per_expert(sorted_ids, owned))
        is_computed = self.keeps(_places(sorted_ids, owned)).unsqueeze(-1)
        return undo_order(torch.where(is_computed, outputs, 0.0), order)

    def keeps(self, places: torch.Tensor) -> torch.Tensor:
        return places < 64


class FewRowsByDivision(FewRows):
    """The constant 64 is split into two divisions, neither of which matters by itself in any run."""

    def keeps(self, places: torch.Tensor) -> torch.Tensor:
        return ((places // 8) // 8) == 0


class FewRowsByDifference(FewRows):
    def keeps(self, places: torch.Tensor) -> torch.Tensor:
        return (places - 64) < 0


class FewRowsBesideASpare(FewRows):
    """An expert takes more rows than any proof run has; the tensor of positions has one element that is never used."""

    def keeps(self, places: torch.Tensor) -> torch.Tensor:
        held = torch.empty(len(places) + 1, dtype=torch.int64)
        held[torch.arange(len(places))] = places
        return (held < 10_000)[: len(places)]


class FewIds(AllReduceExperts):
    """An expert takes 64 tokens; further ids are set to one that belongs to no expert."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        experts = self.placement.experts
        sorted_ids, order = sort_by_expert(top_k_index)
        keep = undo_order(_places(sorted_ids, experts) < 64, order).view(top_k_index.shape)
        ids = self.to_local(torch.where(keep, top_k_index, experts))
        rows, order = self.run_some(hidden_states, ids)
        return sum_over_ranks(weighted_sum(rows, order, top_k_weights), self.group_name)


class FewWeights(AllReduceExperts):
    """An expert takes 64 tokens; the weights of further tokens are set to 0."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        sorted_ids, order = sort_by_expert(self.to_local(top_k_index))
        keep = undo_order(_places(sorted_ids, len(self.placement.owned) + 1) < 64, order).view(top_k_index.shape)
        rows, order = self.run_some(hidden_states, self.to_local(top_k_index))
        return sum_over_ranks(weighted_sum(rows, order, top_k_weights * keep), self.group_name)


NO_MOVE = "is neither a move nor a sum"
CONSTANT = "meets the constant"
ACT_ON_MORE = {
    ClampedOutputs: NO_MOVE,
    ClampedRows: "computed with before its GEMMs",
    NoInfinities: NO_MOVE,
    HiddenByMagnitude: NO_MOVE,
    ClampedPartialSums: NO_MOVE,
    FewRows: "",
    FewRowsByDivision: "",
    FewRowsByDifference: "",
    FewRowsBesideASpare: CONSTANT,
    FewIds: CONSTANT,
    FewWeights: "",
}

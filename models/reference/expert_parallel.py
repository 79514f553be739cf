"""Reference implementations of expert parallelism for inference, in three forms, on functional collectives.

Each form is a module with the signature of transformers' experts, `forward(hidden_states, top_k_index, top_k_weights)`
with global expert ids, and holds the weights of this rank's experts. All ranks of the group must call it. Every form
captures as one graph (`fullgraph=True`), with a dynamic number of tokens. The forms that read a size back to the host
(`all_to_all`, `all_gather`) need `torch._dynamo.config.capture_scalar_outputs = True` for that.

    form          tokens go to the experts by   and come back by   host syncs   ranks hold
    all_to_all    AllToAll, exact sizes         AllToAll           1            different tokens
    all_gather    AllGather, padded             ReduceScatter      1            different tokens
    all_reduce    (no transfer)                 AllReduce          0            the same tokens

Exactness, measured on CPUs against `GroupedExperts` on all ranks' tokens, rank by rank, in one batch, with the threads
of one rank (float32 GEMMs round differently on another number of threads):
    `all_to_all` is bit-identical: every expert sees the same rows in the same order, and the weighted sum runs in the
    same order on the rank that owns the token.
    `all_gather` and `all_reduce` sum on each rank and then over ranks: equal up to rounding. They are bit-identical
    with top-1, and with top-2 if the weights have the dtype of the hidden states, since two terms have one order.
`GroupedExperts` on one rank's tokens alone returns the same up to rounding: a GEMM may round a row differently for a
different number of rows (float32 does below 4 rows for an expert; bfloat16 was not seen to).
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional as F

from moepass.models.errors import InputError
from moepass.models.formulas.expert_placement import ExpertPlacement
from moepass.models.reference.collectives import (
    exchange_rows,
    gather_rows,
    max_over_ranks,
    scatter_sums,
    sum_over_ranks,
)
from moepass.models.reference.grouped_experts import (
    GroupedExperts,
    count_per_expert,
    sort_by_expert,
    undo_order,
    weighted_sum,
)


class ShardedExperts(GroupedExperts):
    """Base class of the three forms. The ranks of `group` share E (`experts`) experts.

    `gate_up_proj` is [experts of this rank, 2h, H], `down_proj` [experts of this rank, H, h]; `ExpertPlacement.owned`
    has their ids. Without a group, all ranks share the experts; torch.distributed must be initialised. Raises
    InputError if the number of experts in the weights is not the number that this rank owns.
    """

    def __init__(
        self, gate_up_proj: torch.Tensor, down_proj: torch.Tensor, experts: int, group: ProcessGroup | None = None
    ) -> None:
        super().__init__(gate_up_proj, down_proj)
        group = group or c10d._get_default_group()
        self.group_name: str = group.group_name
        self.placement = ExpertPlacement(experts, group.size(), group.rank())
        owned = len(self.placement.owned)
        if gate_up_proj.shape[0] != owned or down_proj.shape[0] != owned:
            text = (
                f"rank {group.rank()} of {group.size()} owns {owned} of {experts} experts, but it was given weights of "
                f"{gate_up_proj.shape[0]} (gate_up_proj) and {down_proj.shape[0]} (down_proj)"
            )
            raise InputError(text, rank=group.rank(), value=(gate_up_proj.shape[0], down_proj.shape[0]), expected=owned)

    def to_local(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """Convert global ids to this rank's: 0..owned-1, and `owned` for experts of other ranks."""
        owned = self.placement.owned
        local = expert_ids - owned.start
        return local.masked_fill((local < 0) | (local >= len(owned)), len(owned))


class AllToAllExperts(ShardedExperts):
    """Form 1: each pair of a token and an expert is sent to the expert's rank, and its output back.

    The sizes of the exchange depend on the routing, so ranks first exchange their counts, which the host reads.
    """

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts [tokens, H]. Bit-identical to the reference on all tokens."""
        ranks, owned, shards = self.placement.ranks, len(self.placement.owned), self.placement.shard_sizes
        sorted_ids, order = sort_by_expert(top_k_index)
        leaving = count_per_expert(sorted_ids, self.placement.experts)
        arriving = exchange_rows(leaving, send=shards, receive=[owned] * ranks, group_name=self.group_name)
        send, receive = self._sizes(leaving, arriving.view(ranks, owned))

        rows = exchange_rows(hidden_states[order // top_k_index.shape[1]], send, receive, self.group_name)
        rows = self._run_arrived(rows, arriving)
        rows = exchange_rows(rows, send=receive, receive=send, group_name=self.group_name)
        return weighted_sum(rows, order, top_k_weights).to(hidden_states.dtype)

    def _sizes(self, leaving: torch.Tensor, arriving: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the numbers of rows to send to each rank and to receive from each rank, as integers on the host."""
        send = torch.stack([counts.sum() for counts in leaving.split(self.placement.shard_sizes)])
        sizes = torch.cat([send, arriving.sum(dim=1)]).tolist()
        for size in sizes:
            torch._check(size >= 0)
        return sizes[: self.placement.ranks], sizes[self.placement.ranks :]

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """Run the experts on `rows` [n, H], which are ordered by rank and then by expert, and keep this order.

        `arriving` has the number of rows for each rank and expert.
        """
        owned = len(self.placement.owned)
        if owned == 0:
            return rows
        local_ids = torch.arange(owned, device=rows.device).repeat(self.placement.ranks)
        local_ids = local_ids.repeat_interleave(arriving, output_size=rows.shape[0])
        sorted_ids, order = sort_by_expert(local_ids)
        outputs = self.run_groups(rows[order], count_per_expert(sorted_ids, owned))
        return undo_order(outputs, order)


class AllGatherExperts(ShardedExperts):
    """Form 2: every rank gathers all tokens and runs its own experts on them; the partial sums are scattered back.

    Ranks may have different numbers of tokens: they pad to the largest.
    """

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts [tokens, H], which equals the reference up to rounding."""
        ranks, tokens = self.placement.ranks, hidden_states.shape[0]
        padding = self._most_tokens(hidden_states) - tokens
        torch._check(padding >= 0)

        def gather(values: torch.Tensor, filler: int) -> torch.Tensor:
            return gather_rows(F.pad(values, (0, 0, 0, padding), value=filler), ranks, self.group_name)

        all_states = gather(hidden_states, 0)
        local_ids = self.to_local(gather(top_k_index, self.placement.experts))
        all_weights = gather(top_k_weights, 0)
        rows, order = self.run_some(all_states, local_ids)
        partial = weighted_sum(rows, order, all_weights).to(hidden_states.dtype)
        return scatter_sums(partial, ranks, self.group_name)[:tokens]

    def _most_tokens(self, hidden_states: torch.Tensor) -> int:
        tokens = torch.full((1,), hidden_states.shape[0], device=hidden_states.device)
        return int(max_over_ranks(tokens, self.group_name).item())


class AllReduceExperts(ShardedExperts):
    """Form 3: every rank holds the same tokens and runs its own experts on them; the partial sums are reduced.

    transformers does this if the group that shares the experts also shares the batch.
    """

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts [tokens, H], which equals the reference up to rounding."""
        rows, order = self.run_some(hidden_states, self.to_local(top_k_index))
        partial = weighted_sum(rows, order, top_k_weights).to(hidden_states.dtype)
        return sum_over_ranks(partial, self.group_name)


EP_FORMS: dict[str, type[ShardedExperts]] = {
    "all_to_all": AllToAllExperts,
    "all_gather": AllGatherExperts,
    "all_reduce": AllReduceExperts,
}

"""Prove that the local form of a parallel block computes what the block computes, by running both with mock peers.

The block's nodes are run one by one on real numbers (mock_run.py), with every collective answered by a mock of
the other ranks. What the mock answers follows the contract of the block's form, and what the block gives it must follow
the contract too:

    all_to_all      a rank is sent, rank by rank, rows sorted by expert and how many there are of each expert; it sends
                    back each row's output in the same place
    partial sums    a rank adds up, for every token of every rank, what its own experts contribute

Each rank proves its own graph, with its own constants, so together they prove the whole exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from moepass.passes.graph.collectives import Collective
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.refusals import why_it_stopped
from moepass.passes.parallel.match.parallel_block import ParallelBlock
from moepass.passes.parallel.mock.mock_run import ContractBroken, MockRun
from moepass.passes.parallel.proof.demands import demand, equal
from moepass.passes.parallel.proof.sent_rows import SentRows, expert_outputs


def check_run(run: MockRun) -> None:
    """Raises ContractBroken where the block, or its local form, does not follow the contract in this run."""
    scenario = run.scenario
    try:
        if run.block.form.startswith("all_to_all"):
            _check_exchange(run)
        else:
            _check_partial_sums(run)
    except ContractBroken as error:
        raise ContractBroken(f"with {scenario.name}, {error}") from None
    except NotThisForm:
        raise
    except Exception as error:
        # A node that cannot run on the mock's numbers means that the guess about the block was wrong.
        raise ContractBroken(f"with {scenario.name}, {why_it_stopped(error)}") from error


# ----------------------------------------------------------------------------------------------------------- AllToAll


def _check_exchange(run: MockRun) -> None:
    """Check that what this rank sends, and what it sends back for the rows of others, follows the contract."""
    block = run.block
    rows_node, counts_node = block.sources["rows"], block.sources.get("counts")
    pairs = run.mock.shape(rows_node)[0]
    capacity = None if block.form == "all_to_all" else pairs // block.experts
    own = SentRows.draw(run, run.scenario.own, pairs, range(block.experts), capacity)
    peers = [
        SentRows.draw(run, run.scenario.peers, run.peer_pairs(peer, pairs), block.own_experts, capacity)
        for peer in range(block.group.ranks)
    ]
    if any(exchange.kind == "all_gather" for exchange in block.exchanges):
        # What this rank has for itself is known to it here.
        peers[block.group.rank] = own.part_of(block.own_experts, block.bounds, block.group.rank)
    dispatch, *beside = block.dispatches
    *counts, combine = (exchange for exchange in block.exchanges if exchange not in block.dispatches)

    def check_sizes(send: list[int], receive: list[int]) -> None:
        demand(send == own.sizes_by_rank(block.bounds), f"it sends rows in parts of {send}")
        demand(receive == [len(part.rows) for part in peers], f"it expects rows in parts of {receive}")

    def answer(collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        if collective.node in [exchange.node for exchange in counts]:
            demand(equal(sent.reshape(-1), own.counts), "it sends counts that are not those of its rows")
            if collective.kind == "all_gather":
                return torch.stack([part.all_counts for part in peers]).reshape(-1, *sent.shape[1:]).to(sent.dtype)
            arriving = torch.stack([part.counts[block.own_experts.start : block.own_experts.stop] for part in peers])
            unit = sent.numel() // max(1, sent.shape[0])
            demand(receive == [len(block.own_experts) // max(unit, 1)] * block.group.ranks, "it expects other counts")
            return arriving.reshape(-1, *sent.shape[1:]).to(sent.dtype)
        if collective.node is dispatch.node:
            demand(equal(sent, own.rows), "it sends other rows than it counted")
            check_sizes(send, receive)
            return torch.cat([part.rows for part in peers])
        for number, exchange in enumerate(beside):
            if collective.node is exchange.node:
                demand(equal(sent, own.travelling[number]), "it sends something else beside its rows")
                check_sizes(send, receive)
                return torch.cat([part.travelling[number] for part in peers])
        if collective.node is combine.node:
            expected = expert_outputs(run, peers)
            demand(equal(sent, expected), "it sends back other outputs than its experts' for the rows")
            return expert_outputs(run, [own])
        raise ContractBroken(f"it needs an answer to {collective.kind}")

    values = {rows_node: own.rows, **dict(zip(block.travelling, own.travelling, strict=True))}
    if counts_node is not None:
        values[counts_node] = own.counts.view(run.mock.shape(counts_node))
    run.run_block(values, answer)
    demand(equal(run.run_local_form(values), expert_outputs(run, [own])), "its local form gives something else")


# ------------------------------------------------------------------------------------------------------- partial sums


def _check_partial_sums(run: MockRun) -> None:
    """Check that this rank adds the part of its own experts, for its own tokens and for those of others."""
    block = run.block
    tokens, top_k = run.mock.shape(block.sources["ids"])
    ranks, own_rank = block.group.ranks, block.group.rank
    gathered = block.form == "all_gather"
    most = max(1, run.scenario.load) * tokens + 3 if gathered and _is_padded(block) else tokens
    batches = [
        _Tokens.draw(run, tokens if rank == own_rank else most, top_k) for rank in range(ranks if gathered else 1)
    ]
    own = batches[own_rank if gathered else 0]
    combine = block.exchanges[-1]

    def answer(collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        if collective.node is combine.node:
            partial = _weighted_outputs(run, _Tokens.joined(batches), block.own_experts)
            parts = sent.split(most)
            demand(len(parts) == len(batches), f"it adds up {len(sent)} rows, not those of all tokens")
            wanted = partial.split([len(batch.hidden) for batch in batches])
            sent_rows = torch.cat([part[: len(rows)] for part, rows in zip(parts, wanted, strict=True)])
            demand(equal(sent_rows, partial), "it does not add exactly its own experts' part")
            total = _weighted_outputs(run, own, range(block.experts))
            return F.pad(total, (0, 0, 0, most - tokens), value=torch.nan)
        if collective.kind == "all_reduce" and gathered:
            demand(collective.reduction == "max" and sent.numel() == 1, "it reduces something unknown")
            demand(int(sent) == tokens, "it reduces something other than its number of tokens")
            return torch.full_like(sent, most)
        if collective.kind == "all_gather" and gathered:
            return _gather(sent, batches, own_rank, most)
        raise ContractBroken(f"it needs an answer to {collective.kind}")

    values: Mapping[Node, Any] = {node: own.of(role) for role, node in block.sources.items()}
    found = run.run_block(values, answer)
    demand(equal(run.run_local_form(values), found), "its local form gives something else")


def _gather(sent: torch.Tensor, batches: Sequence[_Tokens], own_rank: int, most: int) -> torch.Tensor:
    """All ranks' rows of the kind that this rank sends. Others bring `most` tokens, so none of theirs is padding."""
    for role in ("hidden", "ids", "weights"):
        mine = getattr(batches[own_rank], role)
        if sent.is_floating_point() == mine.is_floating_point() and equal(sent[: len(mine)], mine):
            demand(len(sent) == most, f"it gathers {len(sent)} rows of {role}, where {most} were agreed on")
            return torch.cat([sent if rank == own_rank else getattr(batch, role) for rank, batch in enumerate(batches)])
    raise ContractBroken("it gathers something that is neither tokens, nor their experts, nor their weights")


def _is_padded(block: ParallelBlock) -> bool:
    return any(exchange.kind == "all_reduce" for exchange in block.exchanges)


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """One rank's tokens: hidden [n, H], ids [n, k], weights [n, k]."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def of(self, role: str) -> torch.Tensor:
        """What the source of that role has; between the GEMMs weights travel with the rows."""
        found: torch.Tensor = getattr(self, "weights" if role.startswith("travels_") else role)
        return found

    @staticmethod
    def draw(run: MockRun, tokens: int, top_k: int) -> _Tokens:
        ids = run.scenario.own(run.generator, tokens * top_k, run.block.id_values).view(tokens, top_k).contiguous()
        return _Tokens(run.random_rows(tokens, run.mock.widths[0][0]), ids, run.random_rows(tokens, top_k))

    @staticmethod
    def joined(batches: Sequence[_Tokens]) -> _Tokens:
        return _Tokens(
            *(torch.cat([getattr(batch, role) for batch in batches]) for role in ("hidden", "ids", "weights"))
        )


def _weighted_outputs(run: MockRun, tokens: _Tokens, experts: range) -> torch.Tensor:
    """The sum, weighted behind or within the experts, over those of each token's that are among `experts`."""
    ids, top_k = tokens.ids.reshape(-1), tokens.ids.shape[1]
    (pairs,) = ((ids >= experts.start) & (ids < experts.stop)).nonzero(as_tuple=True)
    rows, weights = tokens.hidden[pairs // top_k], tokens.weights.reshape(-1)[pairs]
    if run.block.travelling:
        weighed = run.experts(rows, ids[pairs], [weights])
    else:
        weighed = run.experts(rows, ids[pairs]) * weights.unsqueeze(-1)
    total = torch.zeros(len(tokens.hidden), weighed.shape[1], dtype=torch.float64)
    return total.index_add(0, pairs // top_k, weighed)

"""Compare a parallel block with its local form, by running both with mock peers.

The nodes of the block run one by one on real numbers (mock_run.py), and a mock of the other ranks answers every
collective. The mock follows the contract of the block's form, and checks that the block does too:

    all_to_all      a rank receives from each rank rows sorted by expert, and the number of rows of each expert; it
                    sends the outputs back in the same order
    partial sums    a rank sums, for every token of every rank, the weighted outputs of this rank's experts

Each rank proves its own graph, with its own constants, so together they prove the complete exchange.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional as F

from moepass.passes.graph.collectives import Collective
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.refusals import why_it_stopped
from moepass.passes.parallel.mock.mock_run import ContractBroken, MockRun, repeat_each
from moepass.passes.parallel.mock.scenarios import Draw

_TOLERANCE = 1e-9

# The tokens of one rank, by role: `hidden` [n, H], `ids` [n, k], `weights` [n, k].
_Tokens = dict[str, torch.Tensor]


def check_run(run: MockRun) -> None:
    """Raise ContractBroken if the block or its local form violates the contract in this run."""
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
        # A node that fails on the mock's numbers shows that the match was wrong.
        raise ContractBroken(f"with {scenario.name}, {why_it_stopped(error)}") from error


def _check_exchange(run: MockRun) -> None:
    """Check the rows that this rank sends, and the outputs that it returns for rows of other ranks."""
    block = run.block
    rows_node, counts_node = block.sources["rows"], block.sources.get("counts")
    pairs = run.mock.shape(rows_node)[0]
    capacity = None if block.form == "all_to_all" else pairs // block.experts
    own_rows = _SentRows.draw(run, run.scenario.own, pairs, range(block.experts), capacity)
    senders = [
        _SentRows.draw(run, run.scenario.peers, run.peer_pairs(peer, pairs), block.own_experts, capacity)
        for peer in range(block.group.ranks)
    ]
    if any(exchange.kind == "all_gather" for exchange in block.exchanges):
        # After a gather of counts, the block may use its own counts for the rows that it sends to itself.
        senders[block.group.rank] = own_rows.sent_to(block.own_experts, block.bounds, block.group.rank)
    *counts, combine = (exchange for exchange in block.exchanges if exchange not in block.dispatches)

    def answer(collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        if collective.node in [exchange.node for exchange in counts]:
            _demand(_equal(sent.reshape(-1), own_rows.counts), "it sends counts that are not those of its rows")
            if collective.kind == "all_gather":
                return torch.stack([each.all_counts for each in senders]).reshape(-1, *sent.shape[1:]).to(sent.dtype)
            arriving = torch.stack([each.counts[block.own_experts.start : block.own_experts.stop] for each in senders])
            unit = sent.numel() // max(1, sent.shape[0])
            _demand(receive == [len(block.own_experts) // max(unit, 1)] * block.group.ranks, "it expects other counts")
            return arriving.reshape(-1, *sent.shape[1:]).to(sent.dtype)
        for number, exchange in enumerate(block.dispatches):
            if collective.node is exchange.node:
                other = "it sends something else beside its rows" if number else "it sends other rows than it counted"
                _demand(_equal(sent, own_rows.values[number]), other)
                _demand(send == own_rows.sizes_by_rank(block.bounds), f"it sends rows in parts of {send}")
                _demand(receive == [sender.rows for sender in senders], f"it expects rows in parts of {receive}")
                return torch.cat([sender.values[number] for sender in senders])
        if collective.node is combine.node:
            expected = _expert_outputs(run, senders)
            _demand(_equal(sent, expected), "it sends back other outputs than its experts' for the rows")
            return _expert_outputs(run, [own_rows])
        raise ContractBroken(f"it needs an answer to {collective.kind}")

    values = dict(zip((rows_node, *block.travelling), own_rows.values, strict=True))
    if counts_node is not None:
        values[counts_node] = own_rows.counts.view(run.mock.shape(counts_node))
    run.run_block(values, answer)
    _demand(_equal(run.run_local_form(values), _expert_outputs(run, [own_rows])), "its local form gives something else")


@dataclasses.dataclass(frozen=True)
class _SentRows:
    """The `values` that a rank sends, rows first, then those that travel with them: one entry per row, by expert.

    `counts` [E] are the numbers of rows. `all_counts` [E] also has those for experts of other ranks, which a rank sends
    if ranks gather counts.
    """

    values: tuple[torch.Tensor, ...]
    counts: torch.Tensor
    all_counts: torch.Tensor

    @staticmethod
    def draw(run: MockRun, choose: Draw, pairs: int, experts: range, capacity: int | None) -> _SentRows:
        """Draw `pairs` rows for experts that `choose` draws, or `capacity` rows for each of `experts`."""
        total = run.block.experts
        counts = torch.zeros(total, dtype=torch.int64)
        if capacity is not None:
            counts[experts.start : experts.stop] = capacity
        elif len(experts):
            counts = torch.bincount(experts.start + choose(run.generator, pairs, len(experts)), minlength=total)
        all_counts = torch.randint(0, 5, (total,), generator=run.generator)
        all_counts[experts.start : experts.stop] = counts[experts.start : experts.stop]
        shapes = [[run.mock.widths[0][0]], *(run.mock.shape(node)[1:] for node in run.block.travelling)]
        values = tuple(run.random_rows(int(counts.sum()), *shape) for shape in shapes)
        return _SentRows(values, counts, all_counts)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.values[0])

    def sent_to(self, experts: range, bounds: Sequence[int], rank: int) -> _SentRows:
        """Return the rows for the `experts` of `rank`."""
        sizes = self.sizes_by_rank(bounds)
        counts = torch.zeros_like(self.counts)
        counts[experts.start : experts.stop] = self.counts[experts.start : experts.stop]
        return _SentRows(tuple(values.split(sizes)[rank] for values in self.values), counts, self.counts)

    def sizes_by_rank(self, bounds: Sequence[int]) -> list[int]:
        ends = [0, *self.counts.cumsum(0).tolist()]
        return [ends[stop] - ends[start] for start, stop in itertools.pairwise(bounds)]


def _expert_outputs(run: MockRun, senders: Sequence[_SentRows]) -> torch.Tensor:
    """Return the output of its expert for each row of `senders`, one sender after the other."""
    experts = torch.arange(run.block.experts).repeat(len(senders))
    ids = repeat_each(experts, torch.cat([sender.counts for sender in senders]))
    rows, *travelling = (torch.cat(values) for values in zip(*(sender.values for sender in senders), strict=True))
    return run.experts(rows, ids, travelling)


def _check_partial_sums(run: MockRun) -> None:
    """Check that this rank adds exactly the weighted outputs of its experts, for the tokens of all ranks."""
    block = run.block
    tokens, top_k = run.mock.shape(block.sources["ids"])
    ranks, own_rank = block.group.ranks, block.group.rank
    gathered = block.form == "all_gather"
    is_padded = gathered and any(exchange.kind == "all_reduce" for exchange in block.exchanges)
    most = max(1, run.scenario.load) * tokens + 3 if is_padded else tokens
    batches = [
        _draw_tokens(run, tokens if rank == own_rank else most, top_k) for rank in range(ranks if gathered else 1)
    ]
    own_tokens = batches[own_rank if gathered else 0]
    combine = block.exchanges[-1]

    def answer(collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        if collective.node is combine.node:
            of_all_ranks = {role: torch.cat([batch[role] for batch in batches]) for role in own_tokens}
            partial = _weighted_outputs(run, of_all_ranks, block.own_experts)
            padded = sent.split(most)
            _demand(len(padded) == len(batches), f"it adds up {len(sent)} rows, not those of all tokens")
            expected = partial.split([len(batch["hidden"]) for batch in batches])
            sent_rows = torch.cat([shard[: len(rows)] for shard, rows in zip(padded, expected, strict=True)])
            _demand(_equal(sent_rows, partial), "it does not add exactly its own experts' part")
            total = _weighted_outputs(run, own_tokens, range(block.experts))
            return F.pad(total, (0, 0, 0, most - tokens), value=torch.nan)
        if collective.kind == "all_reduce" and gathered:
            _demand(collective.reduction == "max" and sent.numel() == 1, "it reduces something unknown")
            _demand(int(sent) == tokens, "it reduces something other than its number of tokens")
            return torch.full_like(sent, most)
        if collective.kind == "all_gather" and gathered:
            return _gather(sent, batches, own_rank, most)
        raise ContractBroken(f"it needs an answer to {collective.kind}")

    # Weights that are multiplied between the GEMMs have a role `travels_..`.
    values: Mapping[Node, Any] = {
        node: own_tokens["weights" if role.startswith("travels_") else role] for role, node in block.sources.items()
    }
    result = run.run_block(values, answer)
    _demand(_equal(run.run_local_form(values), result), "its local form gives something else")


def _gather(sent: torch.Tensor, batches: Sequence[_Tokens], own_rank: int, most: int) -> torch.Tensor:
    """Return the gathered rows of all ranks. Other ranks have `most` tokens, so only this rank sends padding."""
    for role, values in batches[own_rank].items():
        if sent.is_floating_point() == values.is_floating_point() and _equal(sent[: len(values)], values):
            _demand(len(sent) == most, f"it gathers {len(sent)} rows of {role}, where {most} were agreed on")
            return torch.cat([sent if rank == own_rank else batch[role] for rank, batch in enumerate(batches)])
    raise ContractBroken("it gathers something that is neither tokens, nor their experts, nor their weights")


def _draw_tokens(run: MockRun, tokens: int, top_k: int) -> _Tokens:
    ids = run.scenario.own(run.generator, tokens * top_k, run.block.id_values).view(tokens, top_k).contiguous()
    hidden = run.random_rows(tokens, run.mock.widths[0][0])
    return {"hidden": hidden, "ids": ids, "weights": run.random_rows(tokens, top_k)}


def _weighted_outputs(run: MockRun, tokens: _Tokens, experts: range) -> torch.Tensor:
    """Return for each token the sum of the weighted outputs of its chosen experts that are among `experts`."""
    ids, top_k = tokens["ids"].reshape(-1), tokens["ids"].shape[1]
    (pairs,) = ((ids >= experts.start) & (ids < experts.stop)).nonzero(as_tuple=True)
    rows, weights = tokens["hidden"][pairs // top_k], tokens["weights"].reshape(-1)[pairs]
    if run.block.travelling:
        outputs = run.experts(rows, ids[pairs], [weights])
    else:
        outputs = run.experts(rows, ids[pairs]) * weights.unsqueeze(-1)
    total = torch.zeros(len(tokens["hidden"]), outputs.shape[1], dtype=torch.float64)
    return total.index_add(0, pairs // top_k, outputs)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    left, right = left.double(), right.double()
    # Most are bit-identical, and that is faster to check.
    return torch.equal(left, right) or torch.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE)


def _demand(condition: bool, reason: str) -> None:
    """Raise ContractBroken with `reason` unless `condition` is True."""
    if not condition:
        raise ContractBroken(reason)

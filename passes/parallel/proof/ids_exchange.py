"""Run an AllToAll block whose rows travel with their expert's ids with mock peers.

Contract
    a rank counts its rows by the rank, or by the expert, that they go to, and sends them in parts of these sizes;
    beside each row it sends the id of its expert, one of those of the rank that it goes to, among the experts of all
    ranks or among those of that rank (the form says which)
    what comes to it from others is like that, in any order; it sends back each row's output in the same place

Where the rows come from does not matter: the expert of a row is the one whose id the rank sends beside it.
"""

from __future__ import annotations

import dataclasses

import torch

from moepass.passes.graph.collectives import Collective
from moepass.passes.parallel.match.parallel_block import OWN_IDS
from moepass.passes.parallel.mock.mock_run import ContractBroken, MockRun, repeat_each
from moepass.passes.parallel.proof.demands import demand, equal


@dataclasses.dataclass(frozen=True)
class _PeerRows:
    """What a peer sends: rows in any order, the expert of each among those of all ranks, and what travels with it."""

    rows: torch.Tensor
    ids: torch.Tensor
    travelling: tuple[torch.Tensor, ...]

    @staticmethod
    def draw(run: MockRun, pairs: int) -> _PeerRows:
        own = run.block.own_experts
        ids = own.start + run.scenario.peers(run.generator, pairs, len(own))
        return _PeerRows(run.random_rows(pairs, run.mock.widths[0][0]), ids, _beside(run, pairs))


def check_ids_exchange(run: MockRun) -> None:
    """Raises ContractBroken where the block, or its local form, does not follow the contract in this run."""
    block, mock = run.block, run.mock
    rows_node, ids_node = block.sources["rows"], block.sources["ids"]
    pairs, (tokens, top_k) = mock.shape(rows_node)[0], mock.shape(ids_node)
    chosen = run.scenario.own(run.generator, tokens * top_k, block.experts).view(tokens, top_k).contiguous()
    rows, beside = run.random_rows(pairs, mock.widths[0][0]), _beside(run, pairs)
    exchange = _Exchange(run, rows, beside)
    values = {rows_node: rows, ids_node: chosen, **dict(zip(block.travelling, beside, strict=True))}
    run.run_block(values, exchange.answer)
    demand(equal(run.run_local_form(values), exchange.own_outputs()), "its local form gives something else")


class _Exchange:
    """Plays the other ranks, and keeps what this rank tells of its own rows."""

    def __init__(self, run: MockRun, rows: torch.Tensor, travelling: tuple[torch.Tensor, ...]) -> None:
        self._run = run
        self._block = block = run.block
        self._rows, self._travelling = rows, travelling
        self._peers = [_PeerRows.draw(run, run.peer_pairs(peer, len(rows), None)) for peer in range(block.group.ranks)]
        self._counts = torch.empty(0)
        self._sizes: list[int] | None = None
        self._ids: torch.Tensor | None = None
        self._count, self._id_exchange = block.exchanges[0], block.id_exchange
        self._dispatch, *self._beside = (exchange.node for exchange in block.dispatches)

    def answer(self, collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        node = collective.node
        if node is self._count.node:
            return self._answer_counts(sent, send, receive)
        if node is self._block.exchanges[-1].node:
            self._check_sizes(receive, send)
            demand(equal(sent, self._peer_outputs()), "it sends back other outputs than its experts' for the rows")
            return self.own_outputs()
        self._check_sizes(send, receive)
        if node is self._dispatch:
            demand(equal(sent, self._rows), "it sends other rows than it computes")
            return torch.cat([peer.rows for peer in self._peers])
        if node in self._beside:
            number = self._beside.index(node)
            demand(equal(sent, self._travelling[number]), "it sends something else beside its rows")
            return torch.cat([peer.travelling[number] for peer in self._peers])
        if self._id_exchange is not None and node is self._id_exchange.node:
            return self._answer_ids(sent)
        raise ContractBroken(f"it needs an answer to {collective.kind}")

    def own_outputs(self) -> torch.Tensor:
        """The outputs for the rows that this rank has sent."""
        if self._ids is None:
            raise ContractBroken("it wants outputs of its experts before it sends their ids")
        return self._run.experts(self._rows, self._ids, self._travelling)

    def _peer_outputs(self) -> torch.Tensor:
        beside = zip(*(peer.travelling for peer in self._peers), strict=True)
        rows, ids = (torch.cat([getattr(peer, part) for peer in self._peers]) for part in ("rows", "ids"))
        return self._run.experts(rows, ids, [torch.cat(of_peers) for of_peers in beside])

    def _answer_counts(self, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        ranks = self._block.group.ranks
        demand(len(sent) % ranks == 0 and send == receive == [len(sent) // ranks] * ranks, "it exchanges other counts")
        self._counts = sent.reshape(-1).clone()
        own = self._block.own_experts
        by_expert = [torch.bincount(peer.ids - own.start, minlength=len(own)) for peer in self._peers]
        counts = torch.stack(by_expert if self._counts_experts else [counts.sum() for counts in by_expert])
        return counts.reshape(sent.shape).to(sent.dtype)

    @property
    def _counts_experts(self) -> bool:
        return len(self._counts) == self._block.experts

    def _answer_ids(self, sent: torch.Tensor) -> torch.Tensor:
        block = self._block
        assert self._sizes is not None
        demand(len(sent) == len(self._rows), f"it sends {len(sent)} ids with {len(self._rows)} rows")
        starts = torch.tensor(block.bounds[:-1])
        rank_of = repeat_each(torch.arange(block.group.ranks), torch.tensor(self._sizes))
        own = block.own_experts
        ids = sent.long() + (starts[rank_of] if block.form == OWN_IDS else 0)
        stops = torch.tensor(block.bounds[1:])
        demand(bool(((ids >= starts[rank_of]) & (ids < stops[rank_of])).all()), "it sends ids to ranks without them")
        counted = torch.bincount(ids, minlength=block.experts) if self._counts_experts else torch.tensor(self._sizes)
        demand(equal(self._counts, counted), "it sends counts that are not those of its rows")
        self._ids = ids
        arriving = torch.cat([peer.ids for peer in self._peers]) - (own.start if block.form == OWN_IDS else 0)
        return arriving.to(sent.dtype)

    def _check_sizes(self, send: list[int], receive: list[int]) -> None:
        """All exchanges but that of counts are in parts of the same sizes, and the last one the other way round."""
        if self._sizes is None:
            demand(
                sum(send) == len(self._rows) and min(send) >= 0, f"it sends {len(self._rows)} rows in parts of {send}"
            )
            self._sizes = send
        demand(send == self._sizes, f"it sends in parts of {send}, and of {self._sizes}")
        demand(receive == [len(peer.rows) for peer in self._peers], f"it expects rows in parts of {receive}")


def _beside(run: MockRun, rows: int) -> tuple[torch.Tensor, ...]:
    """What travels with so many rows."""
    return tuple(run.random_rows(rows, *run.mock.shape(node)[1:]) for node in run.block.travelling)

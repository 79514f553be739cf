"""Prove that the local form of a parallel block computes the same as the block, for all values and sizes.

Contract
    in    a block, its local form, and the result of the local form
    out   nothing if they are equal; NotThisForm or ContractBroken if they differ, if the proof fails, and if it would
          take more memory than `MOST_PROOF_BYTES`

Pseudo-code
    check that the activation function computes rows independently, and replace it by functions of a row (row_flow)
    check that data is only moved, weighted and added (data_flow); give ranges to indices and sizes (value_ranges)
    give a separate symbol to a number of tokens that is computed from other sizes (own_symbol)
    make a small copy of the block, with few tokens, slots and features (small_copy)
    if that fails, take the captured block, provided that it fits in memory
    run it with mock peers, in every scenario, and with every expert chosen (peer_equivalence)
    check that the runs met the demands of the ranges
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.parallel.local_form.data_flow import data_nodes
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.parallel.match.parallel_block import ParallelBlock
from moepass.passes.parallel.mock.mock_run import ContractBroken, MockBlock, MockRun
from moepass.passes.parallel.mock.own_symbol import with_own_symbol
from moepass.passes.parallel.mock.scenarios import SCENARIOS, Scenario, among, anywhere
from moepass.passes.parallel.mock.small_copy import small_copies
from moepass.passes.parallel.mock.small_guess import NoSmallCopy
from moepass.passes.parallel.mock.small_sizes import Scale, run_bytes
from moepass.passes.parallel.proof.peer_equivalence import check_run
from moepass.passes.parallel.ranges.value_ranges import ValueRanges
from moepass.passes.parallel.rows.row_flow import RowFlow
from moepass.passes.parallel.rows.row_functions import row_functions

# [Empirical] A run of a few rows takes milliseconds.
MOST_RUNS = 256
# A proof that would take more memory is refused before it begins.
MOST_PROOF_BYTES = 2**30


def check_local_form(block: ParallelBlock, local: LocalForm, result: Node, flow: RowFlow) -> None:
    """Raise ContractBroken or NotThisForm unless `result` is proved equal to the result of the block.

    `flow` is that of the local form (`flow_in_local_form`).
    """
    functions = row_functions(local, flow)
    data = data_nodes(block, local)
    # The compiler runs in fake mode, but mock runs compute real numbers.
    with unset_fake_temporarily(), torch.no_grad():
        renamed = with_own_symbol(MockBlock(block, local, result, functions), data)
        _prove_for_all_sizes(renamed.mock, renamed.data)


def _prove_for_all_sizes(mock: MockBlock, data: set[Node]) -> None:
    ranges = ValueRanges(mock.block, data, mock.local.copied)
    failure: NotThisForm | ContractBroken | None = None
    try:
        for copy in small_copies(mock, data, check_run, MOST_PROOF_BYTES):
            try:
                return _prove(copy.mock, ValueRanges(copy.mock.block, copy.data, copy.mock.local.copied))
            except (NotThisForm, ContractBroken) as error:
                failure = failure or error
    except NoSmallCopy as error:
        needed = run_bytes(mock, Scale())
        if needed > MOST_PROOF_BYTES:
            raise NotThisForm(
                f"to prove its local form right would take {needed} bytes of memory, where {MOST_PROOF_BYTES} are "
                f"allowed, and a smaller copy of it cannot be made: {error}"
            ) from error
        return _prove(mock, ranges)
    except ContractBroken as error:
        raise failure or error from None
    assert failure is not None, "small copies are tried, or there is a reason"
    raise failure


def _prove(mock: MockBlock, ranges: ValueRanges) -> None:
    for seed, scenario in enumerate((*SCENARIOS, *_with_every_id(mock))):
        check_run(MockRun(mock, torch.Generator().manual_seed(seed), scenario, ranges))
    ranges.check()


def _with_every_id(mock: MockBlock) -> Iterator[Scenario]:
    """Yield scenarios in which every expert is chosen, or as many experts as fit in `MOST_RUNS` runs."""
    sources = mock.block.sources
    if "ids" not in sources:
        return
    ids, pairs = range(mock.block.id_values), max(1, math.prod(mock.shape(sources["ids"])))
    for start in range(0, min(len(ids), MOST_RUNS * pairs), pairs):
        yield Scenario("tokens for experts one by one", among(ids[start : start + pairs]), anywhere, 0)

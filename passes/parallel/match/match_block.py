"""Match a block of local expert GEMMs with the forms of expert parallelism.

Contract
    in    a block of expert GEMMs and the communication near it (`find_parallel.py`); the process groups
    out   a record of the parallel block, or NotThisForm. The graph is unchanged.

Pseudo-code
    if an AllToAll takes the results: match the AllToAll of rows before the GEMMs and the exchange of counts
    if an AllReduce or ReduceScatter takes them: match the tokens, their expert ids and their weights
    otherwise, for rows that take two hops, and for sums of split experts between two AllToAlls: raise NotThisForm

A match is a guess: `peer_equivalence.py` runs the block with mock peers, and only equal results allow the rewrite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moepass.passes.blocks.computed_weights import is_computed
from moepass.passes.blocks.detect import BlockMatch
from moepass.passes.blocks.expert_stack import is_expert_stack
from moepass.passes.graph.collectives import Collective, Communication, collective_of
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ir.protocol import CaptureNotes, Group
from moepass.passes.parallel.match.match_all_to_all import match_all_to_all
from moepass.passes.parallel.match.match_partial_sums import match_partial_sums
from moepass.passes.parallel.match.near_experts import written_input
from moepass.passes.parallel.match.parallel_block import ParallelBlock


def match_block(
    match: BlockMatch,
    after: Communication | None,
    arriving: Sequence[Communication],
    groups: Mapping[str, Group],
    capture: CaptureNotes,
) -> ParallelBlock:
    """Return the parallel block between `arriving` and `after`. Raises NotThisForm."""
    if after is None:
        first = arriving[0]
        raise NotThisForm(
            f"its rows or counts come by {first.kind} {named(first.node)}, but nothing in this graph takes its results "
            f"back to the ranks of their tokens; {capture.advice()}"
        )
    combine = collective_of(after.node)
    if combine is None:
        raise NotThisForm(
            f"its results go into {after.kind} {named(after.node)}, which moepass cannot take out; it knows the "
            "functional collectives all_to_all_single, all_reduce and reduce_scatter_tensor of "
            "torch.distributed._functional_collectives"
        )
    if combine.group_name not in groups:
        raise NotThisForm(
            f"this process has not created the process group {combine.group_name!r} of {combine.kind}; create it with "
            "torch.distributed before the model is compiled"
        )
    if match.record.form != "grouped_mm":
        raise NotThisForm(
            f"its GEMMs are {match.record.form}, and expert parallelism is taken out of grouped GEMMs only; "
            "write them with torch.nn.functional.grouped_mm (transformers: experts_implementation='grouped_mm')"
        )
    if match.low_rank:
        pair = " and ".join(named(gemm.node) for gemm in match.low_rank[:2])
        raise NotThisForm(
            f"matrices of low rank, {pair}, stand beside its weights, as those of LoRA do; expected one GEMM for each "
            "matrix of an expert: merge adapters into the weights before the model is compiled (in peft: "
            "model.merge_and_unload())"
        )
    for gemm in match.gemms:
        if gemm.weights.op != "placeholder" and not is_expert_stack(gemm.weights) and not is_computed(gemm.weights):
            raise NotThisForm(
                f"the expert weights of {named(gemm.node)} are not a parameter, but the result of "
                f"{named(gemm.weights)}; keep parameters in the type and layout in which the GEMMs read them"
            )
    try:
        if combine.kind == "all_to_all":
            _check_one_hop(arriving)
            return match_all_to_all(match, combine, groups, capture)
        _check_sum(combine, arriving)
        return match_partial_sums(match, combine, groups[combine.group_name])
    except NotThisForm as error:
        for exchange in arriving:
            if (memory := written_input(exchange)) is not None:
                raise NotThisForm(
                    f"what {exchange.kind} {named(exchange.node)} brings is also written to {named(memory)}, which "
                    "holds it beyond the run, so the exchange cannot go; let it be written to memory that the run "
                    "makes, as by torch.empty"
                ) from error
        raise


def _check_sum(combine: Collective, arriving: Sequence[Communication]) -> None:
    """Raise NotThisForm unless `combine` adds up results, for rows that come by no AllToAll over another group."""
    if combine.kind not in ("all_reduce", "reduce_scatter"):
        raise NotThisForm(
            f"its results go into {combine.kind} {named(combine.node)}; expected all_to_all, or a sum by all_reduce or "
            "reduce_scatter"
        )
    dispatch = next((each for each in arriving if each.kind == "all_to_all"), None)
    if dispatch is not None and dispatch.group_name != combine.group_name:
        raise NotThisForm(
            f"its rows come by all_to_all {named(dispatch.node)}, and {combine.kind} {named(combine.node)} adds up its "
            "results over another process group, as where ranks hold a part of each expert's width; expected complete "
            "experts on one rank each: use a size of 1 for the tensor parallelism of experts, and spread the experts "
            "over those ranks"
        )


def _check_one_hop(arriving: Sequence[Communication]) -> None:
    """Raise NotThisForm if rows come by AllToAlls over two process groups, one after the other."""
    exchanges = [exchange for each in arriving if (exchange := collective_of(each.node)) is not None]
    hops = [exchange for exchange in exchanges if exchange.kind == "all_to_all" and exchange.is_float]
    first = next((hop for hop in hops if hop.group_name != hops[0].group_name), None)
    if first is not None:
        raise NotThisForm(
            f"its rows come in two hops, by {named(first.node)} over one process group and by {named(hops[0].node)} "
            "over another; expected one AllToAll of rows to the experts and one back: send rows over one process "
            "group of all ranks that share the experts"
        )

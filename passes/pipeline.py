"""The ordered list of passes."""

from __future__ import annotations

from torch.fx import GraphModule

from moepass.passes.blocks.detect import detect
from moepass.passes.blocks.hoist_token_return import hoist_token_return
from moepass.passes.blocks.lower_complete_experts import lower_complete_experts
from moepass.passes.blocks.lower_expert_stacks import lower_expert_stacks
from moepass.passes.blocks.rewrite import rewrite
from moepass.passes.blocks.sink_token_gather import sink_token_gather
from moepass.passes.cost.graph_cost import cost
from moepass.passes.dense.compute_chosen_pairs import compute_chosen_pairs
from moepass.passes.dense.group_exchanged_slots import group_exchanged_slots
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import Agree, Observer, Pass, PassContext, PassResult, run_passes
from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.passes.masks.sort_masks import sort_masks
from moepass.passes.memory.activation_memory import activation_memory
from moepass.passes.parallel.eliminate_expert_parallelism import eliminate_expert_parallelism
from moepass.passes.parallel.merge_low_rank import merge_low_rank, split_low_rank
from moepass.passes.schedule.assign_slots import plan
from moepass.passes.schedule.predict import predict
from moepass.passes.schedule.schedule_slots import schedule
from moepass.passes.schedule.verify import verify
from moepass.passes.segments.bank_parts import bank_parts
from moepass.passes.segments.partition import partition
from moepass.passes.slots.compute_read_slots import compute_read_slots
from moepass.passes.slots.leave_out_padding import leave_out_padding
from moepass.passes.slots.look_up_one_hots import look_up_one_hots
from moepass.passes.tokens.hybrid_prefill import hybrid_prefill

PASSES: tuple[Pass, ...] = (
    sort_masks,  # first: loops over experts cut what masks select, and sizes that a run tells hide what is equal
    leave_out_padding,  # before loops are written as GEMMs of all rows, whose padding nobody could tell any more
    write_grouped_gemms,  # all others know experts by their grouped GEMMs
    group_exchanged_slots,  # likewise, where experts with slots are batches
    merge_low_rank,  # likewise, for blocks that have one GEMM for each product
    eliminate_expert_parallelism,  # everything after it sees local blocks only
    split_low_rank,  # what no bank took; before weights that are computed in each run hide experts
    compute_chosen_pairs,  # of local experts, whichever exchange they came from; masks are no lookups yet
    look_up_one_hots,  # masks fill and read slots; the exchange of these is found with or without
    compute_read_slots,  # behind both: slots that are exchanged, or multiplied by a mask, are all read
    lower_expert_stacks,  # what no bank took; before anything looks at how values are made
    lower_complete_experts,  # beside it, for models that ask for complete experts: detect must see their gathers
    detect,  # every later pass works on what it found
    rewrite,  # brings all forms to gathers, so that nothing later has to know the forms
    sink_token_gather,  # before anything refers to a place in the graph
    hoist_token_return,  # likewise, and it puts what a return needs before the lookup
    hybrid_prefill,  # keeps the order of both; before the schedule, since it says how long banks stay
    cost,  # the nodes are those that will run, and every decision after it may look at what they cost
    plan,  # needs the gathers in their final number and order
    schedule,  # carries out the plan
    verify,  # before the cut, while every reader of a slot is still in sight
    partition,  # it follows the scheduling points and hides the nodes between them
    bank_parts,  # needs segments, because it is these that take a bank in parts or not
    activation_memory,  # needs segments too, in the order in which they run
    predict,  # last: it reads the steps that will run, and changes nothing
)


def compile_graph(
    module: GraphModule, context: PassContext, observe: Observer | None = None, agree: Agree | None = None
) -> PassResult:
    """Run every pass over a captured graph: a top-level graph of segments and its plan."""
    return run_passes(PASSES, module, Plan(), context, observe, agree)

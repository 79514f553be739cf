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
from moepass.passes.schedule.assign_slots import plan
from moepass.passes.schedule.predict import predict
from moepass.passes.schedule.schedule_slots import schedule
from moepass.passes.schedule.verify import verify
from moepass.passes.segments.bank_parts import bank_parts
from moepass.passes.segments.fp8_slots import fp8_slots
from moepass.passes.segments.partition import partition
from moepass.passes.slots.compute_read_slots import compute_read_slots
from moepass.passes.slots.look_up_one_hots import look_up_one_hots
from moepass.passes.tokens.hybrid_prefill import hybrid_prefill

PASSES: tuple[Pass, ...] = (
    sort_masks,  # first: loops over experts read rows through masks, whose data-dependent sizes hide equal rows
    write_grouped_gemms,  # all later passes recognise experts by their grouped GEMMs
    group_exchanged_slots,  # the same for experts with capacity slots, which are batched GEMMs
    eliminate_expert_parallelism,  # all later passes see local blocks only
    compute_chosen_pairs,  # after exchanges are gone; before masks become lookups
    look_up_one_hots,  # masks fill and read capacity slots; exchanges are found with or without masks
    compute_read_slots,  # after both: slots that are exchanged, or multiplied by a mask, are all read
    lower_expert_stacks,  # stacks that no bank holds; before passes look at how weights are computed
    lower_complete_experts,  # before detect, which needs the gathers of models that ask for complete experts
    detect,  # all later passes work on its blocks
    rewrite,  # turns all forms into gathers, so that no later pass has to know the forms
    sink_token_gather,  # before any pass refers to positions in the graph
    hoist_token_return,  # the same; it also moves the inputs of a token return before the lookup
    hybrid_prefill,  # keeps the order of both; before the schedule, because it decides how long banks stay
    cost,  # the nodes are final, and all later decisions may use their costs
    plan,  # needs the final number and order of gathers
    schedule,  # inserts what the plan decided
    verify,  # before the cut into segments, while all readers of a slot are in one graph
    partition,  # cuts at the scheduling points
    bank_parts,  # needs segments: they decide whether a bank can be read in parts
    fp8_slots,  # needs the final layout of slots
    activation_memory,  # needs segments in the order in which they run
    predict,  # last: it reads the final steps and changes nothing
)


def compile_graph(
    module: GraphModule, context: PassContext, observe: Observer | None = None, agree: Agree | None = None
) -> PassResult:
    """Run every pass over a captured graph. The result has the top-level graph of segments and its plan."""
    return run_passes(PASSES, module, Plan(), context, observe, agree)

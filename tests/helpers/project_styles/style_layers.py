"""Layers in the styles of other projects: capture them on each rank and take their expert parallelism out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from moepass.passes.dense.group_exchanged_slots import group_exchanged_slots
from moepass.passes.graph.collectives import group_names
from moepass.passes.ir.protocol import PassResult
from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.passes.masks.sort_masks import sort_masks
from moepass.passes.parallel.eliminate_expert_parallelism import eliminate_expert_parallelism
from moepass.passes.slots.compute_read_slots import compute_read_slots
from moepass.passes.slots.look_up_one_hots import look_up_one_hots
from moepass.runtime.execute.adoption import process_groups
from tests.helpers.graphs.eliminated_graphs import eliminate
from tests.helpers.graphs.readable_refusals import check_readable
from tests.helpers.graphs.simulated_ranks import Captured, capture_module, hidden_rows, pretend_rank
from tests.helpers.project_styles.converted_style import FlatWeights, MasterWeights, ScaledModules
from tests.helpers.project_styles.exact_style import SlicesOfModules, SplitOfStacks
from tests.helpers.project_styles.gathered_style import DroppingMasks, GatheredMasks, GatheredOrder
from tests.helpers.project_styles.megatron_style import MaskedDispatch
from tests.helpers.project_styles.overlap_style import OverlappedHalves, OverlappedModules
from tests.helpers.project_styles.slots_style import BatchedSlots, EinsumSlots, IndexedSlots
from tests.helpers.project_styles.style_sizes import StyleSizes

# The layer of each style, and the form of its blocks.
STYLES: dict[str, tuple[type[nn.Module], str]] = {
    "gshard": (EinsumSlots, "all_to_all_slots"),
    "deepspeed": (IndexedSlots, "all_to_all_slots"),
    "batched slots": (BatchedSlots, "all_to_all_slots"),
    "deepseek": (SlicesOfModules, "all_to_all"),
    "torchtitan loop": (SplitOfStacks, "all_to_all"),
    "megatron": (MaskedDispatch, "all_to_all"),
    "megatron gathered": (GatheredMasks, "all_gather"),
    "gathered order": (GatheredOrder, "all_gather"),
    "gathered with drops": (DroppingMasks, "all_gather"),
    "master weights": (MasterWeights, "all_to_all"),
    "flat weights": (FlatWeights, "all_to_all"),
    "scaled modules": (ScaledModules, "all_to_all"),
    "overlapped halves": (OverlappedHalves, "all_to_all"),
    "overlapped modules": (OverlappedModules, "all_to_all"),
}
# Forms in which every rank must have the same number of tokens.
EVEN_FORMS = ("all_to_all_slots", "all_gather")
PASSES = (
    sort_masks, write_grouped_gemms, group_exchanged_slots, eliminate_expert_parallelism,
    look_up_one_hots, compute_read_slots,
)  # fmt: skip
SIZES = StyleSizes()


def capture_layer(
    layer: Callable[[ProcessGroup], nn.Module],
    rank: int,
    ranks: int,
    *,
    sizes: StyleSizes = SIZES,
    tokens: int = 9,
    dynamic: bool = True,
    lower: str = "eager",
) -> Captured:
    """Return the graph of `layer(group)` on `rank` of `ranks`, captured with `tokens` hidden states."""
    with pretend_rank(rank, ranks):
        model = layer(dist.group.WORLD)  # type: ignore[arg-type]
        hidden = hidden_rows(sizes.hidden, tokens, rank, sizes.dtype)
        captured = capture_module(model, hidden, rank, ranks, dynamic=dynamic, lower=lower)
        return dataclasses.replace(captured, groups=process_groups(group_names(captured.module.graph)))


def capture_style(
    style: str, rank: int, ranks: int, *, sizes: StyleSizes = SIZES, tokens: int = 9, dynamic: bool = True
) -> Captured:
    """Return the graph of the layer of `style` on `rank` of `ranks`."""
    layer = functools.partial(STYLES[style][0], sizes)
    return capture_layer(layer, rank, ranks, sizes=sizes, tokens=tokens, dynamic=dynamic)


def eliminate_style(captured: Captured, leave: Mapping[str, str] | None = None) -> PassResult:
    """Return the result of `PASSES` for the graph of one rank; `leave` is as for `eliminate`."""
    return eliminate(captured, leave, PASSES)


def eliminate_readably(captured: Captured) -> PassResult:
    """Return the result of `PASSES`, and check that a user can read its refusals."""
    result = eliminate_style(captured)
    check_readable(result.refusals)
    return result


def host_syncs(result: PassResult) -> list[str]:
    """Return the names of nodes for which the host waits."""
    waits = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")
    return [node.name for node in result.module.graph.nodes if str(node.target).startswith(waits)]

"""Layers with experts over both axes of a mesh, and the banks of their ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.passes.ir.protocol import PassResult
from tests.helpers.graphs.eliminated_graphs import complete_banks
from tests.helpers.graphs.simulated_ranks import Captured
from tests.helpers.project_styles.hops_style import (
    ExactBetweenMachinesFirst,
    ExactByExpert,
    ExactWithinMachineFirst,
    SlotsBetweenMachinesFirst,
    SlotsWithinMachineFirst,
)
from tests.helpers.project_styles.mesh_style import CutExperts, CutExpertsInOrder, CutExpertsOfTokens, CutSlots

SLOTS = (SlotsBetweenMachinesFirst, SlotsWithinMachineFirst)
EXACT = (ExactBetweenMachinesFirst, ExactByExpert, ExactWithinMachineFirst)
# Layers whose experts are cut by width, and the collectives that remain in their graphs.
CUT = {
    CutSlots: ["all_reduce"], CutExpertsInOrder: ["all_reduce"] * 2, CutExperts: ["all_reduce"] * 2,
    CutExpertsOfTokens: ["all_reduce"],
}  # fmt: skip
MESH_LAYERS = (*SLOTS, *EXACT, *CUT)


def banks_of_ranks(captured: Sequence[Captured], results: Sequence[PassResult]) -> list[dict[int, list[torch.Tensor]]]:
    """Return the complete banks of each rank, built from the ranks of the group that it gathers with."""
    group_members = [
        rank.groups[result.plan.banks[0].group].members for rank, result in zip(captured, results, strict=True)
    ]
    banks = {
        members: complete_banks([captured[rank] for rank in members], [results[rank] for rank in members])
        for members in set(group_members)
    }
    return [banks[members] for members in group_members]

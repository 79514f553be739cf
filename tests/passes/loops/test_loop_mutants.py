"""Loops over masks and slices of experts, changed at one node, are rewritten correctly or left unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.passes.masks.sort_masks import sort_masks
from tests.helpers.mutants.local_mutants import LocalMutants
from tests.helpers.project_styles.local_loops import (
    HIDDEN,
    AnyPlace,
    FlatPairs,
    MixtralLoop,
    NonzeroLoop,
    OneExpert,
    SelectedLoop,
)
from tests.helpers.project_styles.slice_loops import SlicesByCounts, UncheckedSlices

LOOPS: dict[str, type[nn.Module]] = {
    "mixtral": MixtralLoop, "selected": SelectedLoop, "nonzero": NonzeroLoop, "slices": SlicesByCounts,
    "unchecked slices": UncheckedSlices, "any place": AnyPlace, "flat pairs": FlatPairs, "one expert": OneExpert,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_mutants_are_written_rightly_or_left(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(tokens, HIDDEN, generator=generator) for tokens in (11, 4, 23)]
    LocalMutants(LOOPS[name], inputs, (sort_masks, write_grouped_gemms)).check_some(10, needed={"left", "right"})

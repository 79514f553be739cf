"""Layers of dense experts, changed at one node, are rewritten correctly or left unchanged."""

from __future__ import annotations

import pytest

from moepass.passes.dense.compute_chosen_pairs import compute_chosen_pairs
from tests.helpers.graphs.captured_layers import random_tokens
from tests.helpers.mutants.local_mutants import LocalMutants
from tests.helpers.project_styles.dense_experts import TAKEN

LAYERS = {kind.__name__: kind for kind in TAKEN}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_mutants_are_computed_rightly_or_left(name: str) -> None:
    inputs = [random_tokens(number) for number in (11, 4, 23)]
    LocalMutants(LAYERS[name], inputs, (compute_chosen_pairs,)).check_some(30, needed={"left", "right"})

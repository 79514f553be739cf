"""Why variants of the reference experts are refused."""

from __future__ import annotations

import pytest

from moepass.models.reference.expert_parallel import EP_FORMS, ShardedExperts
from tests.helpers.graphs.eliminated_graphs import eliminate
from tests.helpers.graphs.simulated_ranks import capture
from tests.helpers.models.moe_stack import StackConfig

CONFIG = StackConfig(layers=1)


def refusal_of_experts(
    form: str, experts: type[ShardedExperts], dynamic: bool = True, config: StackConfig = CONFIG, tokens: int = 12
) -> str:
    """Return the reason why a layer of `form` with `experts` is refused on rank 1 of 2; "" if it is taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EP_FORMS, form, experts)
        captured = capture(config, form, 1, 2, tokens, dynamic=dynamic)
    refusals = eliminate(captured).refusals
    return refusals[0].reason if refusals else ""

"""Expert parallelism over an emulated link: AllToAlls take bytes / bandwidth seconds, like copies of weights."""

from __future__ import annotations

import time

import torch

from moepass.models.reference.expert_parallel import AllToAllExperts
from tests.helpers.models.moe_stack import MoEStack


@torch.library.custom_op("moepass_benchmarks::link_delay", mutates_args={"rows"})
def link_delay(rows: torch.Tensor, crossing: torch.Tensor, bytes_per_s: float) -> None:
    """Sleep for the transfer time of `crossing` of `rows` [n, ...]. The operator changes nothing, but is not moved."""
    row_bytes = rows[:1].numel() * rows.element_size()
    time.sleep(int(crossing) * row_bytes / bytes_per_s)


class DelayedExperts(AllToAllExperts):
    """Experts behind an emulated link, which delays both the rows from other ranks and the results for them."""

    bytes_per_s: float

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        ranks, owned = self.placement.ranks, len(self.placement.owned)
        crossing = arriving.sum() - arriving.view(ranks, owned)[self.placement.rank].sum()
        link_delay(rows, crossing, self.bytes_per_s)
        outputs = super()._run_arrived(rows, arriving)
        link_delay(outputs, crossing, self.bytes_per_s)
        return outputs


def exchanges_take(model: MoEStack, bytes_per_s: float) -> MoEStack:
    """Return `model` with its AllToAlls delayed as on a link of this bandwidth.

    The model must be of form all_to_all over the default group.
    """
    for layer in model.moe:
        owned = layer.experts
        assert isinstance(owned, AllToAllExperts)
        layer.experts = DelayedExperts(owned.gate_up_proj.data, owned.down_proj.data, owned.placement.experts).eval()
        layer.experts.bytes_per_s = bytes_per_s
    return model

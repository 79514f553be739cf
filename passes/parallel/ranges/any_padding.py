"""Any padding in the place of the block's own: numbers of rows that were rounded up, by more or less than it does.

A model adds rows of padding to those of each expert, up to a multiple of 8, 16 or 128, and computes how many there are
together from that. What comes out must not depend on it. So the proof lets a mock run choose how many rows of padding
there are, as it chooses how many tokens come: a block that is right with any padding is right with its own. With what
the model computes no constant is left which more tokens might pass.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.parallel.ranges.step_functions import StepFunction

# Describes what a node pads: an AnyPadding.
PADDING_KEY = "moepass_any_padding"
# How nodes are called, for those who look at names alone.
ANY_PADDING = "any_padding"


@dataclasses.dataclass(frozen=True)
class AnyPadding:
    """From `least` to `most` times as many rows as a run chooses; `number` tells functions apart.

    `own` is what the block itself makes of the counts.
    """

    least: int
    most: int
    number: int
    own: StepFunction

    def padded(self, counts: torch.Tensor, unit: int | None, seed: int) -> torch.Tensor:
        """`counts`, int64, with rows of padding: `unit` is how many a run has at most for each expert.

        Equal counts have equal padding, wherever the block computes it: often none, or as much as there may be. Where
        there is no unit, it is the block's own.
        """
        if unit is None:
            return torch.as_tensor(self.own.at(counts.numpy()))
        low, span = self.least * unit, (self.most - self.least) * unit
        mixed = (counts + 1) * 2654435761 + (seed + 1) * 40503 + (self.number + 1) * 69069
        mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**31
        anywhere, way = mixed // 4 % (span + 1), mixed % 4
        added = torch.where(way == 0, 0, torch.where(way == 1, span, anywhere))
        return counts + low + added


def any_padding(counts: Any) -> Any:
    """Stands in the copy of a block for what pads `counts`: a tensor, or sizes of which it pads the sum."""
    raise NotImplementedError("a mock run chooses what this gives")


def padding_of(node: Node) -> AnyPadding | None:
    """What `node` pads in the copy of a block; None where it is no such node."""
    found = node.meta.get(PADDING_KEY) if node.target is any_padding else None
    assert found is None or isinstance(found, AnyPadding)
    return found

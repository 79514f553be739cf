"""Check that mock runs have tried the values that a block's indices and sizes may have.

Contract
    in    requirements: nodes that must have each of a set of values in some run, and masks that must be both 0 and 1;
          then the values of these nodes in each run
    out   NotThisForm, naming the node, if a requirement was not met
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.parallel.ranges.growing_sizes import refuse


@dataclasses.dataclass
class _Outcomes:
    """Counts of the results 0 and 1 of a mask, for each element of `constant` if it results from a comparison with one.

    `undecided` returns whether a comparison with a value of `constant` may be both true and false.
    """

    constant: Node | None
    undecided: Callable[[float], bool] | None
    counts: list[torch.Tensor] = dataclasses.field(default_factory=lambda: [torch.zeros(()), torch.zeros(())])


class TriedValues:
    """The values that the mock runs of one block must try, and those that they have tried."""

    def __init__(self) -> None:
        # The first value of each set, and whether each value of the set was tried.
        self._sets: dict[Node, tuple[int, torch.Tensor]] = {}
        self._masks: dict[Node, _Outcomes] = {}
        self._constants: dict[Node, torch.Tensor] = {}

    def require_all(self, node: Node, number: int, first: int = 0) -> None:
        """Require each of first..first+number-1 among the values of `node`."""
        _, seen = self._sets.get(node, (first, torch.zeros(0, dtype=torch.bool)))
        self._sets[node] = (first, seen if len(seen) >= number else torch.zeros(number, dtype=torch.bool))

    def require_both(
        self, node: Node, constant: Node | None = None, undecided: Callable[[float], bool] | None = None
    ) -> None:
        """Require that the mask `node` is 0 and 1, for each element of `constant` that is `undecided`."""
        self._masks[node] = _Outcomes(constant, undecided)
        if constant is not None:
            self._constants.setdefault(constant, torch.empty(0))

    def requires_both(self, node: Node) -> bool:
        """Return whether the mask `node` must be 0 and 1."""
        return node in self._masks

    def observe(self, node: Node, value: Any) -> None:
        """Record the value of `node` in a run. Raises NotThisForm if part of it is uninitialised memory."""
        if isinstance(value, torch.Tensor):
            if value.numel() == 0:
                return
            # Mock runs fill uninitialised memory with the largest number of its dtype.
            if value.dtype in (torch.int32, torch.int64) and bool((value == torch.iinfo(value.dtype).max).any()):
                refuse(node, "holds uninitialised memory", "fill all of it")
        elif not isinstance(value, (bool, int, float)):
            return
        if node in self._constants and isinstance(value, torch.Tensor):
            self._constants[node] = value
        if node in self._sets:
            first, seen = self._sets[node]
            numbers = torch.as_tensor(value).reshape(-1).long() - first
            seen[numbers[(numbers >= 0) & (numbers < len(seen))]] = True
        if node in self._masks:
            outcomes = self._masks[node]
            shape = () if outcomes.constant is None else fake_value(outcomes.constant).shape
            for outcome, count in enumerate(outcomes.counts):
                outcomes.counts[outcome] = count + (torch.as_tensor(value) == outcome).long().sum_to_size(shape)

    def check(self) -> None:
        """Raise NotThisForm for the first requirement that the runs did not meet."""
        for node, (first, seen) in self._sets.items():
            if not bool(seen.all()):
                missing = int((~seen).nonzero()[0]) + first
                refuse(node, f"is never {missing} in sample runs", "use more tokens")
        for node, outcomes in self._masks.items():
            self._check_mask(node, outcomes)

    def _check_mask(self, node: Node, outcomes: _Outcomes) -> None:
        missing = (outcomes.counts[0] == 0) | (outcomes.counts[1] == 0)
        against = ""
        if outcomes.constant is not None and outcomes.undecided is not None:
            values = self._constants[outcomes.constant]
            if values.numel() == 0:
                return
            undecided = [outcomes.undecided(constant) for constant in values.flatten().tolist()]
            missing &= torch.tensor(undecided).view(missing.shape)
            if bool(missing.any()):
                against = f" for the constant {values.expand(missing.shape)[missing].flatten()[0].item():g}"
        if bool(missing.any()):
            reason = f"had the same result{against} in all sample runs"
            refuse(node, f"{reason}, and may have another with other numbers of tokens")

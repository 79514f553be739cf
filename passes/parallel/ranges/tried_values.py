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
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.not_this_form import NotThisForm

# Mock runs fill uninitialised memory with this value.
UNWRITTEN = {dtype: torch.iinfo(dtype).max for dtype in (torch.int32, torch.int64)}


@dataclasses.dataclass
class _Outcomes:
    """Counts of the results 1 and 0 of a mask, for each element of `constant` if it results from a comparison with one.

    `undecided` returns for each value of `constant` whether a comparison with it may be both true and false.
    """

    constant: Node | None
    undecided: Callable[[torch.Tensor], torch.Tensor] | None
    true_counts: torch.Tensor | int = 0
    false_counts: torch.Tensor | int = 0


class TriedValues:
    """The values that the mock runs of one block must try, and those that they have tried."""

    def __init__(self) -> None:
        self._sets: dict[Node, torch.Tensor] = {}
        self._first: dict[Node, int] = {}
        self._masks: dict[Node, _Outcomes] = {}
        self._constants: dict[Node, torch.Tensor] = {}

    def require_all(self, node: Node, number: int, first: int = 0) -> None:
        """Require each of first..first+number-1 among the values of `node`."""
        self._first[node] = first
        required = self._sets.get(node)
        if required is None or len(required) < number:
            self._sets[node] = torch.zeros(number, dtype=torch.bool)

    def require_both(
        self, node: Node, constant: Node | None = None, undecided: Callable[[torch.Tensor], torch.Tensor] | None = None
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
            if value.dtype in UNWRITTEN and bool((value == UNWRITTEN[value.dtype]).any()):
                raise NotThisForm(f"{node.name} ({node.target}) holds uninitialised memory; fill all of it")
        elif not isinstance(value, (bool, int, float)):
            return
        if node in self._constants and isinstance(value, torch.Tensor):
            self._constants[node] = value
        if node in self._sets:
            numbers = torch.as_tensor(value).reshape(-1).long() - self._first[node]
            numbers = numbers[(numbers >= 0) & (numbers < len(self._sets[node]))]
            self._sets[node][numbers] = True
        if node in self._masks:
            self._record_mask(self._masks[node], torch.as_tensor(value))

    def _record_mask(self, outcomes: _Outcomes, value: torch.Tensor) -> None:
        shape = () if outcomes.constant is None else fake_value(outcomes.constant).shape
        true_counts, false_counts = ((value == outcome).long() for outcome in (1, 0))
        outcomes.true_counts = outcomes.true_counts + true_counts.sum_to_size(shape)
        outcomes.false_counts = outcomes.false_counts + false_counts.sum_to_size(shape)

    def check(self) -> None:
        """Raise NotThisForm for the first requirement that the runs did not meet."""
        with unset_fake_temporarily():  # the compiler runs in fake mode; the recorded values are real
            for node, seen in self._sets.items():
                if not bool(seen.all()):
                    missing = int((~seen).nonzero()[0]) + self._first[node]
                    raise NotThisForm(f"{node.name} ({node.target}) is never {missing} in sample runs; use more tokens")
            for node, outcomes in self._masks.items():
                self._check_mask(node, outcomes)

    def _check_mask(self, node: Node, outcomes: _Outcomes) -> None:
        missing = (torch.as_tensor(outcomes.true_counts) == 0) | (torch.as_tensor(outcomes.false_counts) == 0)
        against = ""
        if outcomes.constant is not None and outcomes.undecided is not None:
            values = self._constants[outcomes.constant]
            if values.numel() == 0:
                return
            missing &= outcomes.undecided(values).view(missing.shape)
            if bool(missing.any()):
                against = f" for the constant {values.expand(missing.shape)[missing].flatten()[0].item():g}"
        if bool(missing.any()):
            raise NotThisForm(
                f"{node.name} ({node.target}) had the same result{against} in all sample runs, and may have another "
                "with other numbers of tokens; let nothing between the collectives of the experts depend on it"
            )

"""What the mock runs saw of a block's places and sizes, and whether that is all that it had to be.

Contract
    in    what has to be tried: nodes of which all of a finite set of values must come, truths that must come out both
          ways; then the values that nodes had in each run
    out   NotThisForm, naming the node, where some of it did not come
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

# Mock runs fill empty memory with this value.
UNWRITTEN = {dtype: torch.iinfo(dtype).max for dtype in (torch.int32, torch.int64)}


@dataclasses.dataclass
class _Outcomes:
    """How often a truth came out as 1 and as 0, by element of `constant` where it is compared with one.

    `undecided` tells for the values of `constant` whether a comparison with them may come out both ways.
    """

    constant: Node | None
    undecided: Callable[[torch.Tensor], torch.Tensor] | None
    held: torch.Tensor | int = 0
    failed: torch.Tensor | int = 0


class TriedValues:
    """What has to be tried, and what the runs of one block tried of it."""

    def __init__(self) -> None:
        self._sets: dict[Node, torch.Tensor] = {}
        self._first: dict[Node, int] = {}
        self._truths: dict[Node, _Outcomes] = {}
        self._constants: dict[Node, torch.Tensor] = {}

    def require_all(self, node: Node, number: int, first: int = 0) -> None:
        """Of `node` each of first..first+number-1 must come."""
        self._first[node] = first
        known = self._sets.get(node)
        if known is None or len(known) < number:
            self._sets[node] = torch.zeros(number, dtype=torch.bool)

    def require_both(
        self,
        node: Node,
        constant: Node | None = None,
        undecided: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """The truth `node` must be seen as 0 and as 1; for each element of `constant` that is `undecided`."""
        self._truths[node] = _Outcomes(constant, undecided)
        if constant is not None:
            self._constants.setdefault(constant, torch.empty(0))

    def requires_both(self, node: Node) -> bool:
        return node in self._truths

    def observe(self, node: Node, value: Any) -> None:
        """Note what `node` had in a run. Raises NotThisForm where that is still what the run fills empty memory with.

        What nobody wrote would pass for a place or size beyond every other.
        """
        if isinstance(value, torch.Tensor):
            if value.numel() == 0:
                return
            if value.dtype in UNWRITTEN and bool((value == UNWRITTEN[value.dtype]).any()):
                raise NotThisForm(f"{node.name} ({node.target}) holds memory that nobody has written")
        elif not isinstance(value, (bool, int, float)):
            return
        if node in self._constants and isinstance(value, torch.Tensor):
            self._constants[node] = value
        if node in self._sets:
            numbers = torch.as_tensor(value).reshape(-1).long() - self._first[node]
            numbers = numbers[(numbers >= 0) & (numbers < len(self._sets[node]))]
            self._sets[node][numbers] = True
        if node in self._truths:
            self._note_truth(self._truths[node], torch.as_tensor(value))

    def _note_truth(self, outcomes: _Outcomes, value: torch.Tensor) -> None:
        shape = () if outcomes.constant is None else fake_value(outcomes.constant).shape
        held, failed = ((value == outcome).long() for outcome in (1, 0))
        outcomes.held = outcomes.held + held.sum_to_size(shape)
        outcomes.failed = outcomes.failed + failed.sum_to_size(shape)

    def check(self) -> None:
        """Raises NotThisForm for the first of what had to be tried and was not."""
        with unset_fake_temporarily():  # the compiler runs in fake mode; what was seen is real
            for node, seen in self._sets.items():
                if not bool(seen.all()):
                    missing = int((~seen).nonzero()[0]) + self._first[node]
                    raise NotThisForm(
                        f"{node.name} ({node.target}) may be {missing}, which no run that was tried has; compile with "
                        "more tokens, so that every expert can be tried"
                    )
            for node, outcomes in self._truths.items():
                self._check_truth(node, outcomes)

    def _check_truth(self, node: Node, outcomes: _Outcomes) -> None:
        missing = (torch.as_tensor(outcomes.held) == 0) | (torch.as_tensor(outcomes.failed) == 0)
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
                f"{node.name} ({node.target}) came out one way only{against} in all runs that were tried, and may come "
                "out another way with other numbers of tokens; let nothing between the collectives of the experts "
                "depend on it"
            )

"""Ranges of a parallel block's indices and sizes, and a check that mock runs tried everything that matters about them.

Contract
    in    a block, its data nodes (data_flow.py), and the values of all other nodes in mock runs; not its activation
          function, which reads no indices or sizes (row_flow.py)
    out   NotThisForm, naming the node and the constant, for an unknown operation on indices or sizes, a dtype that
          does not hold them exactly, a constant that they may pass with more tokens, and values that no run tried

A block that keeps 64 rows of each expert and drops the others is right in every run with fewer rows. So everything that
may hide a threshold is refused, or becomes a requirement for the runs:

    GROWS      may only be moved, counted, added a few times, and compared with growing values, -1, 0 or 1. It may be
               divided once, by the number of experts per token.
    BOUND      may be moved, added, and compared with anything.
    BY_EXPERT  may go through any integer function, since runs must try every expert id.
    masks      of values that are BOUND or GROW must be true and false in some run, in every node that computes, selects
               or joins them, and for each constant of a comparison with several. So must clamps, and masks that meet in
               one row or index in every combination (joint_masks.py).

Mock runs compute in float64 and never round, so floating-point numbers and narrow integers must be exact.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.traits import Trait, base_operation, has_trait, operation
from moepass.passes.parallel.match.parallel_block import ParallelBlock
from moepass.passes.parallel.ranges.exact_types import check_type
from moepass.passes.parallel.ranges.growing_sizes import check_sizes, dimensions_that_grow, grows_in_size, refuse
from moepass.passes.parallel.ranges.joint_masks import JointMasks
from moepass.passes.parallel.ranges.known_ranges import KnownRanges, refuse_unknown
from moepass.passes.parallel.ranges.range_arithmetic import ARITHMETIC_RULES, bounds_of, with_copies
from moepass.passes.parallel.ranges.range_moves import MOVE_RULES
from moepass.passes.parallel.ranges.value_range import COUNT, Kind, Range


class ValueRanges:
    """Ranges of a block's indices and sizes, and the values that its mock runs must try. Raises NotThisForm."""

    def __init__(self, block: ParallelBlock, data: set[Node], inside: Collection[Node]) -> None:
        self._known = known = KnownRanges(block)
        self._add_sources(block)
        self._joint = JointMasks(known.range_of)
        by_row = {*inside, *(gemm.node for gemm in block.gemms)}
        for node in block.region:
            if node in inside:
                self._joint.add(node, None, by_row=True)
                continue
            if node.op == "call_function":
                check_sizes(node, known.structural, known.tokens)
            if node in data:
                known.check_indices(node, is_data=True)
                self._check_factors(node, data)
                self._joint.add(node, None, by_row=node in by_row)
                continue
            if dimensions_that_grow(node) > 1:
                # Pairs of rows grow with the square of the rows, which is a threshold without a constant.
                refuse(node, "has more than one dimension that grows")
            values = _range(node, known)
            if values.kind is Kind.FIXED and not values.empty and not values.uniform and grows_in_size(node):
                values = values.at_least(Kind.BOUND)  # the order of constants depends on the number of elements
            check_type(node, values)
            known.ranges[node] = values = with_copies(node, values, known)
            self._require_both(node, values)
            self._joint.add(node, values)
            self._add_bound(node, values)

    def observe(self, node: Node, value: Any) -> None:
        """Record the value of `node` in a run. Raises NotThisForm if part of it is uninitialised memory."""
        if node in self._known.ranges and not self._known.ranges[node].empty:
            self._known.tried.observe(node, value)
        self._joint.observe(node, value)

    def check(self) -> None:
        """Raise NotThisForm for the first requirement that the runs did not meet."""
        self._known.tried.check()
        self._joint.check()

    def _add_sources(self, block: ParallelBlock) -> None:
        if "ids" in block.sources:
            ids = block.sources["ids"]
            self._known.ranges[ids] = Range(0, block.id_values - 1, Kind.BY_EXPERT, ids)
            # A graph without tokens has no ids, but may receive those of other ranks.
            if not _is_empty(ids):
                self._known.tried.require_all(ids, block.id_values)
        if "counts" in block.sources:
            self._known.ranges[block.sources["counts"]] = COUNT

    def _check_factors(self, node: Node, data: set[Node]) -> None:
        """Check that rows are multiplied by and added to masks and constants only: runs do not try every number."""
        if base_operation(node) not in ("add", "sub", "mul"):
            return
        for used in node.all_input_nodes:
            if used not in data and (values := self._known.range_of(used)).kind > Kind.BY_EXPERT and not values.small:
                refuse(node, "computes rows with indices or sizes")

    def _require_both(self, node: Node, values: Range) -> None:
        if isinstance(fake_value(node), (tuple, list)):  # getitem on it gets the requirement
            return
        needs_both = values.kind > Kind.BY_EXPERT and values.small and not values.uniform
        if not needs_both or _is_empty(node) or self._known.tried.requires_both(node):
            return
        if values.low >= 0:
            self._known.tried.require_both(node)
        elif values.integral:  # -1, 0 and 1
            self._known.tried.require_all(node, int(values.high - values.low) + 1, first=int(values.low))

    def _add_bound(self, node: Node, result: Range) -> None:
        """Require that mock runs pass and do not pass each bound of a clamp, minimum or maximum."""
        if not has_trait(node, Trait.BOUND) or result.kind <= Kind.BY_EXPERT or self._known.tried.requires_both(node):
            return
        value, lower, upper = bounds_of(node, self._known)
        values = self._known.range_of(value)
        below = lower is not None and values.low < self._known.range_of(lower).high
        above = upper is not None and values.high > self._known.range_of(upper).low
        if below or above:
            self._joint.add_bound(node, value, below, above)


def _range(node: Node, known: KnownRanges) -> Range:
    names = (operation(node), base_operation(node))
    for keys, rule in (*MOVE_RULES, *ARITHMETIC_RULES):
        if any(key in names if isinstance(key, str) else has_trait(node, key) for key in keys):
            return rule(node, known)
    refuse_unknown(node, known)


def _is_empty(node: Node) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and 0 in [size for size in value.shape if isinstance(size, int)]

"""Check that the dtypes of indices and sizes hold them exactly, since mock runs compute in float64 and never round.

float32 holds every integer up to 2**24 and bfloat16 up to 256, so numbers that grow with the tokens must be integers.
The only exception are the counts of `histc`, which transformers uses on CPUs: they may be moved and cast to integers.
They are exact up to 16,777,216 rows of one expert on one rank; beyond that the model itself counts wrong.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.ops.traits import MOVES, Trait, base_operation, has_trait
from moepass.passes.parallel.ranges.growing_sizes import refuse
from moepass.passes.parallel.ranges.value_range import Kind, Range

# The largest number up to which a dtype holds every integer.
_EXACT = {
    torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8, torch.int64: 2**63 - 1,
    torch.int32: 2**31 - 1, torch.int16: 2**15 - 1, torch.int8: 2**7 - 1, torch.uint8: 2**8 - 1, torch.bool: 1,
}  # fmt: skip
# Operators that neither compute nor cast. A write to a slice may cast.
_MOVES = tuple({*MOVES} - {Trait.SLICE_WRITE})


def check_type(node: Node, values: Range) -> None:
    """Raise NotThisForm if the dtype of `node` does not hold `values` exactly, or operators in it would round them."""
    value = fake_value(node)
    if not isinstance(value, torch.Tensor) or values.empty:
        return
    dtype, name = value.dtype, base_operation(node)
    if values.kind is Kind.FIXED and has_trait(node, Trait.FILL, Trait.FILL_LIKE, *_MOVES):
        return
    if values.grows:
        counts = dtype in (torch.float32, torch.float64) and (name == "histc" or has_trait(node, *_MOVES))
        exact = dtype is torch.int64 or (dtype is torch.int32 and name != "mul") or counts
    else:
        exact = values.integral and max(abs(values.low), abs(values.high)) <= _EXACT.get(dtype, 0)
    if not exact:
        reason = f"has indices or sizes from {values.low:g} to {values.high:g} in {dtype}"
        refuse(node, f"{reason}, which does not hold all of them exactly", "compute them in int64")

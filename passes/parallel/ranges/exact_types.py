"""Places and sizes in types that hold them exactly: mock runs compute in float64, and do not see where others round.

float32 has every integer to 2**24 and bfloat16 to 256, so what grows with the tokens is counted in integers. Counts
that `histc` gives, as transformers has them on a CPU, are the one exception: they may be moved, and made integers
again. Up to 16,777,216 rows of one expert on one rank they are exact; beyond, it is the model itself that counts wrong.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ops.traits import MOVES, Trait, base_operation, has_trait
from moepass.passes.parallel.ranges.value_range import Kind, Range

# Up to here a type has every integer.
_EXACT = {
    torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8, torch.int64: 2**63 - 1,
    torch.int32: 2**31 - 1, torch.int16: 2**15 - 1, torch.int8: 2**7 - 1, torch.uint8: 2**8 - 1, torch.bool: 1,
}  # fmt: skip
# These compute nothing, and do not cast: a write to a slice may.
_MOVES = tuple({*MOVES} - {Trait.SLICE_WRITE})


def check_type(node: Node, values: Range) -> None:
    """Raises NotThisForm where the type of `node` does not hold `values`, or operations on it would round them."""
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
        exact = values.whole and max(abs(values.low), abs(values.high)) <= _EXACT.get(dtype, 0)
    if not exact:
        raise NotThisForm(
            f"{node.name} ({node.target}) has places or sizes from {values.low:g} to {values.high:g} in {dtype}, which "
            "does not hold all of them exactly; compute them in int64"
        )

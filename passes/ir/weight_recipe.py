"""How a tensor of a bank is made of parameters: by casts, views and sums of them, once, when a rank gives its part."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class WeightRecipe:
    """What this rank computes its part [own experts, ..] of the tensor at `position` of a bank by.

    `inputs` are places among the parameters that the bank is made of. A step is a call of an operator, as JSON text:
    `{"operator": "aten.permute.default", "args": [..], "kwargs": {..}}`, where `{"value": n}` stands for input n, or,
    behind the inputs, for the result of an earlier step, and `{"dtype": "bfloat16"}` for a type. The last step gives
    the part.
    """

    position: int
    inputs: tuple[int, ...]
    steps: tuple[str, ...]


# What steps may be, by names without variant, of ATen and prims: their results follow from their arguments alone.
RECIPE_OPERATIONS = frozenset({
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select",
    "split", "split_with_sizes", "unbind", "getitem", "alias", "detach", "_to_copy", "convert_element_type", "clone",
    "cat", "stack", "add", "sub", "mul", "div", "neg", "mm", "bmm",
})  # fmt: skip

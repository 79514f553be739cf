"""Recipes that compute a tensor of a bank from parameters by casts, views and sums, when a rank packs its shard."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class WeightRecipe:
    """The computation of this rank's part [local experts, ...] of the tensor at `position` of a bank.

    Attributes:
        inputs: positions among the parameters of the bank
        steps: calls of operators as JSON text, `{"operator": "aten.permute.default", "args": [..], "kwargs": {..}}`.
            `{"value": n}` is input n, or the result of an earlier step, counted after the inputs; `{"dtype":
            "bfloat16"}` is a type. The last step returns the part
    """

    position: int
    inputs: tuple[int, ...]
    steps: tuple[str, ...]


# Pure operators of ATen and prims that a step may call, by their names without overload.
RECIPE_OPERATIONS = frozenset({
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice", "select",
    "split", "split_with_sizes", "unbind", "getitem", "alias", "detach", "_to_copy", "convert_element_type", "clone",
    "cat", "stack", "add", "sub", "mul", "div", "neg", "mm", "bmm",
})  # fmt: skip

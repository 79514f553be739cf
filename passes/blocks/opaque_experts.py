"""Opaque operators of other libraries that compute experts, whose GEMMs no pass can see."""

from __future__ import annotations

import re

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.source_lines import describe_node

# Libraries whose operators other passes know.
_KNOWN = {"aten", "prims", "moepass", "transformers", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
_EXPERT_NAME = re.compile(r"(^|_)(moe|experts?)(_|$)")


def is_foreign(node: Node) -> bool:
    """Return whether `node` calls an operator of a library that no pass knows."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _KNOWN


def opaque_reason(node: Node, weights: list[Node]) -> str | None:
    """Return why `node` is refused if it seems to compute experts, with `weights` [experts, ., .]; else None."""
    name = node.target._schema.name  # type: ignore[union-attr]
    experts = {int(fake_value(weight).shape[0]) for weight in weights}
    is_named = _EXPERT_NAME.search(name.split("::")[-1]) is not None
    if not is_named and not any(_is_routing(used, experts) for used in node.all_input_nodes if used not in weights):
        return None
    read = f", which reads {', '.join(map(describe_node, weights[:2]))}" if weights else ""
    return (
        f"the experts are inside the opaque operator {name}{read}: moepass sees neither their GEMMs nor "
        "their exchanges, so it runs unchanged; write the experts in PyTorch operators, as grouped GEMMs or a loop, or "
        "give the operator an implementation that torch.compile traces through (CompositeImplicitAutograd)"
    )


def _is_routing(node: Node, experts: set[int]) -> bool:
    """Return whether `node` may be router logits [tokens, experts] or ids [tokens, k]."""
    value = fake_value(node)
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or not experts:
        return False
    return value.shape[1] in experts if value.is_floating_point() else value.dtype in (torch.int64, torch.int32)

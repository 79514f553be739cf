"""Experts inside an operator of another library are refused with its name; other operators are not experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moepass.passes.blocks.detect import detect
from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, run_passes

TOKENS, HIDDEN, EXPERTS, WIDTH = 6, 8, 4, 16
_library = torch.library.Library("moepass_tests_opaque", "DEF")
_library.define("moe_forward(Tensor hidden, Tensor logits, str layer) -> Tensor")
_library.define("fused(Tensor hidden, Tensor up, Tensor down, Tensor weights, Tensor ids) -> Tensor")
_library.define("by_logits(Tensor hidden, Tensor up, Tensor down, Tensor logits) -> Tensor")
_library.define("rotate(Tensor hidden, Tensor table) -> Tensor")
_library.define("remoer(Tensor hidden) -> Tensor")
for name in ("moe_forward", "fused", "by_logits", "rotate", "remoer"):
    _library.impl(name, lambda hidden, *arguments: hidden.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"moepass_tests_opaque::{name}", lambda hidden, *arguments: torch.empty_like(hidden), lib=_library
    )
ops = torch.ops.moepass_tests_opaque

HIDDEN_STATES, LOGITS = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, EXPERTS)
UP, DOWN = torch.randn(EXPERTS, HIDDEN, WIDTH), torch.randn(EXPERTS, WIDTH, HIDDEN)


def refusals(model: Callable[..., torch.Tensor], arguments: int, *inputs: torch.Tensor) -> list[str]:
    module = make_fx(model, tracing_mode="fake")(*inputs)
    for node in [node for node in module.graph.nodes if node.op == "placeholder"][:arguments]:
        node.meta[ARGUMENT_KEY] = True
    return [refusal.reason for refusal in run_passes((detect,), module, Plan(), PassContext()).plan.refusals]


def routed_by_ids(hidden: torch.Tensor, logits: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    weights, ids = logits.softmax(-1).topk(2)
    return ops.fused(hidden, up, down.transpose(1, 2), weights, ids)  # type: ignore[no-any-return]


def routed_by_logits(hidden: torch.Tensor, logits: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return ops.by_logits(hidden, up, down, logits)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("model", "name"), [(routed_by_ids, "fused"), (routed_by_logits, "by_logits")])
def test_an_operator_that_is_given_expert_weights_and_a_choice(model: Callable[..., torch.Tensor], name: str) -> None:
    (reason,) = refusals(model, 2, HIDDEN_STATES, LOGITS, UP, DOWN)
    assert f"inside the opaque operator moepass_tests_opaque::{name}, which reads" in reason
    assert "write the experts in PyTorch operators" in reason


def test_opaque_experts_are_recognised_by_operator_name() -> None:
    """The operator of vLLM looks its layer up by name, so it has no weights among its inputs."""
    (reason,) = refusals(lambda hidden, logits: ops.moe_forward(hidden, logits, "layers.0"), 2, HIDDEN_STATES, LOGITS)
    assert "inside the opaque operator moepass_tests_opaque::moe_forward: " in reason


def test_other_operators_of_other_libraries_are_not_experts() -> None:
    table = torch.randn(EXPERTS, HIDDEN, HIDDEN)
    assert refusals(lambda hidden, table: ops.rotate(hidden, table), 1, HIDDEN_STATES, table) == []
    assert refusals(lambda hidden: ops.remoer(hidden), 1, HIDDEN_STATES) == []

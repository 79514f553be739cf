"""Small models of every form of block, and their graphs at every stage of the compiler."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  registers the fallback of grouped_mm
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node
from torch.nn import functional as F

import moepass
from moepass.passes.graph.nodes import is_call
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, run_passes
from moepass.passes.ir.slot_operations import acquire, decode, gather, prefetch, release
from moepass.passes.pipeline import PASSES

EXPERTS, HIDDEN, WIDTH, TOKENS, TOP_K = 4, 32, 64, 6, 2
SLOT_OP_NAMES = {prefetch: "prefetch", decode: "decode", acquire: "acquire", release: "release"}


class Experts(nn.Module):
    """Expert weights of one layer: gated or not, fused or split, with or without biases, transposed or not."""

    def __init__(
        self,
        *,
        gated: bool = True,
        split: bool = False,
        bias: bool = False,
        transposed: bool = False,
        dtype: torch.dtype = torch.float32,
        width: int = WIDTH,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.gated, self.split, self.bias, self.transposed = gated, split, bias, transposed
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return nn.Parameter(values.to(dtype), requires_grad=False)

        outer = 2 * width if gated and not split else width
        # As in transformers: [experts, out, in] unless the class says that it is transposed.
        self.up = weight(EXPERTS, HIDDEN, outer) if transposed else weight(EXPERTS, outer, HIDDEN)
        if split:
            self.gate = weight(EXPERTS, HIDDEN, width) if transposed else weight(EXPERTS, width, HIDDEN)
        self.down = weight(EXPERTS, width, HIDDEN) if transposed else weight(EXPERTS, HIDDEN, width)
        if bias:
            self.up_bias = weight(EXPERTS, outer)
            self.down_bias = weight(EXPERTS, HIDDEN)

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` as [., in, out]."""
        return weight if self.transposed else weight.transpose(-2, -1)

    def activate(self, up: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        if gate is not None:
            return F.silu(gate) * up
        if self.gated:
            left, right = up.chunk(2, dim=-1)
            return F.silu(left) * right
        return up.relu()


class BatchedBlock(Experts):
    """Weights are selected for each token: bmm over an index."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        rows = x[torch.arange(flat.shape[0]) // ids.shape[1]]

        def gemm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.bmm(rows.unsqueeze(1), self.matrix(weight[flat])).squeeze(1)

        up = gemm(rows, self.up)
        if self.bias:
            up = up + self.up_bias[flat]
        hidden = self.activate(up, gemm(rows, self.gate) if self.split else None)
        out = gemm(hidden, self.down)
        if self.bias:
            out = out + self.down_bias[flat]
        return out.view(x.shape[0], ids.shape[1], -1).sum(1)


class GroupedBlock(Experts):
    """Tokens are sorted by expert: grouped_mm in bf16, transformers' fallback operator in other types."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        owners = flat[order]
        rows = x[order // ids.shape[1]]
        counts = torch.histc(owners.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = counts.cumsum(0).to(torch.int32)

        def gemm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if rows.dtype == torch.bfloat16:
                return torch._grouped_mm(rows, self.matrix(weight), ends)
            result: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, self.matrix(weight), ends)
            return result

        up = gemm(rows, self.up)
        if self.bias:
            up = up + self.up_bias[owners]
        hidden = self.activate(up, gemm(rows, self.gate) if self.split else None)
        out = gemm(hidden, self.down)
        if self.bias:
            out = out + self.down_bias[owners]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return out[back].view(x.shape[0], ids.shape[1], -1).sum(1)


class DenseBlock(Experts):
    """Every expert computes every token, as in llama4."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = x.repeat(EXPERTS, 1).view(EXPERTS, -1, x.shape[-1])
        up = torch.bmm(rows, self.matrix(self.up))
        if self.bias:
            up = up + self.up_bias[:, None]
        hidden = self.activate(up, torch.bmm(rows, self.matrix(self.gate)) if self.split else None)
        out = torch.bmm(hidden, self.matrix(self.down))
        if self.bias:
            out = out + self.down_bias[:, None]
        return out.sum(0)


BLOCKS: dict[str, type[Experts]] = {"grouped_mm": GroupedBlock, "batched_mm": BatchedBlock, "dense_bmm": DenseBlock}


class Stack(nn.Module):
    """`depth` layers, each a linear layer, a router and a block with a residual connection."""

    def __init__(
        self, form: str = "batched_mm", depth: int = 3, dtype: torch.dtype = torch.float32, **kind: Any
    ) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, dtype=dtype) for _ in range(depth))
        self.blocks = nn.ModuleList(BLOCKS[form](dtype=dtype, seed=layer, **kind) for layer in range(depth))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, block in zip(self.linears, self.blocks, strict=True):
            x = x + linear(x)
            ids = x[:, :EXPERTS].topk(TOP_K, dim=-1).indices
            x = x + block(x, ids).tanh()
        return x


def tokens(count: int = TOKENS, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclasses.dataclass
class Captured:
    """The first graph of a model, and the real inputs of its last run."""

    module: GraphModule
    inputs: list[Any]
    output: Any
    graphs: int

    def run(self, module: GraphModule | None = None) -> Any:
        """Return the outputs of `module` (by default the captured graph) for the recorded inputs, as a tuple."""
        with torch.no_grad():
            return tuple((module or self.module)(*self.inputs))


def capture(model: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **keywords: Any) -> Captured:
    """Return the graph that AOT passes to the backend for `model`, before any pass."""
    graphs: list[GraphModule] = []
    recorded: list[list[Any]] = []

    def keep(module: GraphModule, fake_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(module)

        def run(arguments: list[Any]) -> Any:
            recorded.append(list(arguments))
            arguments.clear()
            return module(*recorded[-1])

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def refuse(module: GraphModule, fake_inputs: Sequence[Any]) -> Any:
        raise AssertionError("captured a training graph")

    backend = aot_autograd(fw_compiler=refuse, inference_compiler=keep, keep_inference_input_mutations=True)
    with torch.no_grad():
        output = torch.compile(model, backend=backend, dynamic=dynamic)(*inputs, **keywords)
    return Captured(graphs[0], recorded[0], output, len(graphs))


def streamed(model: nn.Module, *inputs: Any, slots: int = 2, dynamic: bool | None = None) -> Captured:
    """Offload the experts of `model`, then capture it."""
    moepass.offload_experts(model, slots=slots)
    return capture(model, *inputs, dynamic=dynamic)


def up_to(stage: str, module: GraphModule, slots: int = 2, disabled: frozenset[str] = frozenset()) -> PassResult:
    """Return the result of all passes up to and including `stage`."""
    names = [function.__name__ for function in PASSES]
    return run_passes(PASSES[: names.index(stage) + 1], module, Plan(), PassContext(slots, disabled))


def count(module: GraphModule, target: object) -> int:
    return sum(is_call(node, target) for node in module.graph.nodes)


def operators(module: GraphModule) -> Counter[str]:
    """Count the calls of each operator in `module`, including slot operations and gathers."""
    return Counter(str(node.target) for node in module.graph.nodes if node.op == "call_function")


def slot_order(module: GraphModule) -> list[str]:
    """Return the slot operations in host order, as `prefetch 0>1` (bank 0 into slot 1)."""
    return [
        f"{SLOT_OP_NAMES[node.target]} {node.kwargs['bank']}>{node.kwargs['slot']}"
        for node in module.graph.nodes
        if is_call(node, *SLOT_OP_NAMES)
    ]


def find(module: GraphModule, target: object) -> list[Node]:
    return [node for node in module.graph.nodes if is_call(node, target)]


def fingerprint(module: GraphModule) -> tuple[str, tuple[tuple[str, str, str, tuple[str, ...]], ...]]:
    """Return everything in a graph that a pass can change: its code, and every node's arguments and metadata keys."""
    return module.code, tuple(
        (node.name, str(node.target), f"{node.args}{node.kwargs}", tuple(sorted(map(str, node.meta))))
        for node in module.graph.nodes
    )


__all__ = [
    "BLOCKS", "EXPERTS", "HIDDEN", "TOKENS", "TOP_K", "WIDTH", "Captured", "Experts", "Stack", "capture", "count",
    "find", "fingerprint", "gather", "operators", "slot_order", "streamed", "tokens", "up_to",
]  # fmt: skip

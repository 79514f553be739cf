"""A small mixture-of-experts model without attention, with its experts on one rank or on many.

Weights come from a seed for each expert, so every rank can draw only its own experts, and a single process all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional as F

from moepass.models.errors import InputError, one_of
from moepass.models.formulas.expert_placement import ExpertPlacement
from moepass.models.reference.expert_parallel import EP_FORMS
from moepass.models.reference.grouped_experts import GroupedExperts

LOCAL = "local"


@dataclasses.dataclass(frozen=True)
class StackConfig:
    """The sizes of a stack. Equal configs produce equal weights, for every form and number of ranks.

    Attributes:
        layers: Number of layers, each with a dense GEMM and experts.
        hidden: Size of a hidden state, H.
        width: Size between the two GEMMs of an expert, h.
        experts: Number of experts of a layer on all ranks, E.
        top_k: Number of experts of each token.
        normalise: Whether the weights of a token's experts add up to 1.
        skew: Standard deviation of a fixed bias on the router's logits: 0 spreads tokens evenly, 2 sends most of them
            to few experts.
        dtype: Type of weights and hidden states.
        seed: Seed of all weights.
    """

    layers: int = 2
    hidden: int = 64
    width: int = 32
    experts: int = 8
    top_k: int = 2
    normalise: bool = True
    skew: float = 0.0
    dtype: torch.dtype = torch.float32
    seed: int = 0


class ExpertRouter(nn.Module):
    """A router that chooses top-k of E experts for each token by softmax, in float32, as Qwen3-MoE does.

    Args:
        weight: [E, H].
        bias: [E].
        top_k: Number of experts of each token.
        normalise: Whether the weights of a token's experts add up to 1.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, top_k: int, normalise: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self.top_k = top_k
        self.normalise = normalise

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (top_k_index, top_k_weights), both [tokens, k], for hidden_states [tokens, H]."""
        logits = F.linear(hidden_states.float(), self.weight.float(), self.bias.float())
        weights, index = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return index, weights.to(hidden_states.dtype)


class MoELayer(nn.Module):
    """A router and experts of any form, from [tokens, H] to [tokens, H]."""

    def __init__(self, router: ExpertRouter, experts: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.experts(hidden_states, *self.router(hidden_states))
        return output


class MoEStack(nn.Module):
    """Layers of a dense GEMM and experts, each with a norm and a residual connection, for hidden states [tokens, H].

    Tokens do not depend on each other, so the tokens of many ranks can be compared with one batch of all of them.
    """

    def __init__(self, dense: Sequence[nn.Linear], moe: Sequence[MoELayer]) -> None:
        super().__init__()
        self.dense = nn.ModuleList(dense)
        self.moe = nn.ModuleList(moe)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        size = hidden_states.shape[-1:]
        for dense, moe in zip(self.dense, self.moe, strict=True):
            hidden_states = hidden_states + dense(F.rms_norm(hidden_states, size))
            hidden_states = hidden_states + moe(F.rms_norm(hidden_states, size))
        return hidden_states


def build_stack(config: StackConfig, form: str = LOCAL, group: ProcessGroup | None = None) -> MoEStack:
    """Return the model of `config` in eval mode on the CPU.

    Args:
        config: Its sizes.
        form: The form of the experts, one of `EP_FORMS`, or "local" for all experts in this process.
        group: The process group, as in `ShardedExperts`.

    Raises:
        InputError: If `form` is unknown.
    """
    dense = [_linear(config, _generator(config.seed, layer, 0)) for layer in range(config.layers)]
    routers = [_router(config, _generator(config.seed, layer, 1)) for layer in range(config.layers)]
    moe = [MoELayer(router, build_experts(config, form, group, layer)) for layer, router in enumerate(routers)]
    return MoEStack(dense, moe).eval()


def build_experts(
    config: StackConfig, form: str = LOCAL, group: ProcessGroup | None = None, layer: int = 0
) -> GroupedExperts:
    """Return the experts of one layer of `build_stack`, on the CPU. Raises InputError as `build_stack` does."""
    if form == LOCAL:
        return GroupedExperts(*_expert_weights(config, range(config.experts), layer))
    if form not in EP_FORMS:
        raise InputError(f"unknown form {form!r}; it must be one of {one_of([LOCAL, *EP_FORMS])}")
    group = group or c10d._get_default_group()
    owned = ExpertPlacement(config.experts, group.size(), group.rank()).owned
    weights = _expert_weights(config, owned, layer)
    return EP_FORMS[form](*weights, config.experts, group)


def _generator(*key: int) -> torch.Generator:
    # A tensor's values must not depend on which others are drawn, so each has its own seed.
    seed = 0
    for number in key:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)


def _draw(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return normal values with a standard deviation of one over the square root of the fan-in."""
    return torch.randn(shape, generator=generator).div(math.sqrt(shape[-1])).to(dtype)


def _linear(config: StackConfig, generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(config.hidden, config.hidden, bias=False, device="meta")
    linear.weight = nn.Parameter(_draw(generator, config.dtype, config.hidden, config.hidden), requires_grad=False)
    return linear


def _router(config: StackConfig, generator: torch.Generator) -> ExpertRouter:
    weight = _draw(generator, config.dtype, config.experts, config.hidden)
    bias = config.skew * torch.randn(config.experts, generator=generator)
    return ExpertRouter(weight, bias.to(config.dtype), config.top_k, config.normalise)


def _expert_weights(config: StackConfig, owned: range, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.empty(len(owned), 2 * config.width, config.hidden, dtype=config.dtype)
    down = torch.empty(len(owned), config.hidden, config.width, dtype=config.dtype)
    for index, expert in enumerate(owned):
        generator = _generator(config.seed, layer, 2, expert)
        gate_up[index] = _draw(generator, config.dtype, *gate_up.shape[1:])
        down[index] = _draw(generator, config.dtype, *down.shape[1:])
    return gate_up, down

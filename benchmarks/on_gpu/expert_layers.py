"""Expert layers of transformers models, tokens routed to them, and their results in float64."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig

from moepass.models.sizes.architecture import Experts
from moepass.models.sizes.families import from_config
from moepass.runtime.offload.offload import find_expert_modules

ROUTINGS = ("uniform", "skewed")


@dataclasses.dataclass(frozen=True)
class Routed:
    """Tokens [n, H], and the ids [n, k] and weights [n, k] of their experts."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the arguments of an expert layer."""
        return self.hidden, self.index, self.weights


@dataclasses.dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer of a model with random weights, as `module(hidden, index, weights)`."""

    name: str
    module: Any
    hidden: int
    experts: Experts

    @staticmethod
    def of(name: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> ExpertLayer:
        """Return the first layer with experts of the model of `config`."""
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # describes the published checkpoint; the weights here have `dtype`
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.set_experts_implementation("grouped_mm")
        module = next(iter(find_expert_modules(model).values())).to_empty(device=device)
        draw_weights(module, seed=0)
        architecture = from_config(config)
        experts = architecture.typical_moe_layer.experts
        assert experts is not None
        return ExpertLayer(name, module.eval(), architecture.hidden, experts)

    @property
    def up(self) -> torch.Tensor:
        """Return the weights [E, H, 2h] of gate and up, as a view."""
        weights: torch.Tensor = self.module.gate_up_proj.detach()
        return weights if self.module.is_transposed else weights.transpose(1, 2)

    def routed(self, tokens: int, routing: str) -> Routed:
        """Return random tokens. If `skewed`, the n-th expert has a share of 1 / n, and the last quarter has none."""
        device, dtype = self.up.device, self.up.dtype
        generator = torch.Generator(device).manual_seed(tokens)
        hidden = torch.randn(tokens, self.hidden, device=device, generator=generator).to(dtype)
        count, top_k = self.experts.count, self.experts.top_k
        shares = torch.ones(count, device=device)
        if routing == "skewed":
            shares = 1 / torch.arange(1, count + 1, device=device)
            shares[max(top_k, count - count // 4) :] = 0
        # The Gumbel trick draws different experts for each token, by their shares.
        noise = torch.rand(tokens, count, device=device, generator=generator).clamp(1e-20).log().neg().log().neg()
        index = (shares.log() + noise).topk(top_k, dim=-1).indices
        weights = torch.rand(tokens, top_k, device=device, generator=generator).softmax(dim=-1)
        return Routed(hidden, index, weights.to(dtype))

    def exact(self, routed: Routed, tokens: torch.Tensor) -> torch.Tensor:
        """Return the results [len(tokens), H] in float64, computed by the model's loop over each token's experts."""
        rows = []
        for token in tokens.tolist():
            chosen = routed.index[token]
            alone = copy.copy(self.module)
            alone._parameters = {
                name: nn.Parameter(value.detach()[chosen].double(), requires_grad=False)
                for name, value in self.module.named_parameters()
            }
            alone.num_experts = len(chosen)
            hidden, weights = (value[token : token + 1].double() for value in (routed.hidden, routed.weights))
            index = torch.arange(len(chosen), device=hidden.device)[None]
            rows.append(type(alone).forward.__wrapped__(alone, hidden, index, weights))
        return torch.cat([row.reshape(1, -1) for row in rows])


def draw_weights(module: nn.Module, seed: int, layers: str = "") -> None:
    """Fill all parameters: matrices preserve the size of values, vectors are small and never zero."""
    for name, value in module.named_parameters():
        if not name.startswith(layers):
            continue
        generator = torch.Generator(value.device).manual_seed(seed + sum(map(ord, name)))
        fan_in = min(value.shape[-2:]) if value.dim() > 2 else value.shape[-1]
        scale = 1 / math.sqrt(fan_in) if value.dim() > 1 else 0.1
        with torch.no_grad():
            # Matrix by matrix, because a float32 copy of a bank would take twice its memory.
            for matrix in value if value.dim() > 2 else (value,):
                matrix.normal_(generator=generator).mul_(scale)


def sorted_pairs(routed: Routed, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token of each pair, sorted by expert, and the end of each expert's pairs, int32."""
    flat = routed.index.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=experts).cumsum(0).to(torch.int32)
    return order // routed.index.shape[1], ends


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error of a row relative to the row's norm; NaN if there is one in the results."""
    off = (found.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)
    return float(off.max())


def dense_layer(layer: ExpertLayer, pairs: int) -> Any:
    """Return two dense GEMMs with the layer's FLOPs, on random values: [pairs, H] x [H, 2h], [pairs, h] x [h, H]."""
    up, width = layer.up, layer.experts.width
    generator = torch.Generator(up.device).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=up.device, dtype=up.dtype).normal_(generator=generator)

    rows, inner = draw(pairs, layer.hidden), draw(pairs, width)
    first, second = draw(layer.hidden, up.shape[2]), draw(width, layer.hidden)
    return lambda: (F.linear(rows, first.T), F.linear(inner, second.T))

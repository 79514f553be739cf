"""The expert layers to measure kernels with: those of well-known models, from the package's presets."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import GraphModule

from moepass.models.sizes.presets import preset
from tests.helpers.models.expert_segments import ExpertSizes, expert_inputs, expert_segment

MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "gpt-oss-120b")


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """The experts of one layer. If `interleaved`: biases, interleaved clamped gates, and weights [in, out]."""

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int
    interleaved: bool

    def sizes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> ExpertSizes:
        """Return the sizes of the expert computation for `tokens` tokens."""
        return ExpertSizes(tokens, tokens * self.top_k, self.experts, self.hidden, self.width, dtype)

    def segment(self, tokens: int) -> GraphModule:
        """Return the expert segment in bf16, on meta tensors."""
        inputs = expert_inputs(self.sizes(tokens), device="meta", turned=self.interleaved)
        what = ("clamped, interleaved", "biases, returned") if self.interleaved else ("swiglu", "returned")
        return expert_segment(*what, inputs)

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of the grouped GEMMs: gate and up, then down."""
        return 6 * tokens * self.top_k * self.hidden * self.width


def expert_shape(name: str) -> ExpertShape:
    """Return the layer of a preset. Raises InputError if the preset is unknown or has no experts."""
    architecture = preset(name)
    experts = architecture.typical_moe_layer.experts
    assert experts is not None
    # Only gpt_oss has biases among these families, and interleaved gates and transposed weights.
    return ExpertShape(name, architecture.hidden, experts.width, experts.count, experts.top_k, experts.bias)


def even_rows(pairs: int, experts: int) -> list[int]:
    """Return equal numbers of rows for each expert."""
    return [pairs // experts + (number < pairs % experts) for number in range(experts)]


def skewed_rows(pairs: int, experts: int) -> list[int]:
    """Return the rows of each expert: the n-th most popular one has a share of 1 / n, and the last quarter has none."""
    shares = [1 / (number + 1) if number < experts - experts // 4 else 0.0 for number in range(experts)]
    rows = [int(pairs * share / sum(shares)) for share in shares]
    rows[0] += pairs - sum(rows)
    return rows

"""Expert computations as models write them, traced as graphs, for tests and benchmarks of kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch._subclasses import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """The sizes of an expert computation.

    Attributes:
        tokens: Number of tokens.
        pairs: Number of pairs of a token and an expert.
        experts: Number of experts.
        hidden: Size of a token's hidden state.
        width: Size between the two GEMMs.
        dtype: Type of tokens and weights.
        rank: Rank of low-rank deltas.
    """

    tokens: int
    pairs: int
    experts: int
    hidden: int
    width: int
    dtype: torch.dtype = torch.float32
    rank: int = 8


@dataclasses.dataclass
class ExpertInputs:
    """The tensors of one call. Matrices are [experts, out, in]; if `turned`, `in` is the outer dimension in memory.

    Attributes:
        x: Hidden states [tokens, hidden].
        token: The token of each pair [pairs], sorted by expert.
        expert: The expert of each pair [pairs], sorted.
        order: The index of each pair [pairs] in the order of tokens.
        ends: The end of each expert's pairs [experts], int32.
        weight: The routing weight of each pair [pairs, 1].
        up: Gate and up projections [experts, 2 * width, hidden].
        up_bias: Their biases [experts, 2 * width].
        down: Down projections [experts, hidden, width].
        down_bias: Their biases [experts, hidden].
        up_in: First factor of the low-rank deltas of `up` [experts, rank, hidden].
        up_out: Second factor of the low-rank deltas of `up` [experts, 2 * width, rank].
    """

    x: torch.Tensor
    token: torch.Tensor
    expert: torch.Tensor
    order: torch.Tensor
    ends: torch.Tensor
    weight: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    up_in: torch.Tensor
    up_out: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


def expert_inputs(
    sizes: ExpertSizes, shares: torch.Tensor | None = None, device: str = "cpu", turned: bool = False
) -> ExpertInputs:
    """Return random inputs. Tensors on the device `meta` have shapes only.

    `shares` [experts] are the relative probabilities that a pair goes to each expert; None means equal.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=sizes.dtype, device=device)
        drawn = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        return drawn.to(device, sizes.dtype)

    def weights(outer: int, inner: int) -> torch.Tensor:
        return draw(sizes.experts, inner, outer).mT if turned else draw(sizes.experts, outer, inner)

    shares = torch.ones(sizes.experts) if shares is None else shares
    expert = torch.multinomial(shares, sizes.pairs, replacement=True, generator=generator).sort().values
    ends = torch.bincount(expert, minlength=sizes.experts).cumsum(0).to(torch.int32)
    token = torch.randint(0, sizes.tokens, (sizes.pairs,), generator=generator)
    e, h, w = sizes.experts, sizes.hidden, sizes.width
    return ExpertInputs(
        x=draw(sizes.tokens, h) * h**0.5,
        token=token.to(device),
        expert=expert.to(device),
        order=torch.randperm(sizes.pairs, generator=generator).to(device),
        ends=ends.to(device),
        weight=torch.rand(sizes.pairs, 1, generator=generator).to(device, sizes.dtype),
        up=weights(2 * w, h),
        up_bias=draw(e, 2 * w),
        down=weights(h, w),
        down_bias=draw(e, h),
        up_in=draw(e, sizes.rank, h),
        up_out=draw(e, 2 * w, sizes.rank),
    )


def _rows(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    # Python's indexing would need the device, which fake tensors may lack.
    chosen: torch.Tensor = torch.ops.aten.index.Tensor(table, [numbers])
    return chosen


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


def _interleaved(both: torch.Tensor) -> torch.Tensor:
    gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _squared_relu(both: torch.Tensor) -> torch.Tensor:
    return F.relu(both[:, : both.shape[1] // 2]).square()


# The operations between the two GEMMs, by name.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": _gated(F.silu),
    "geglu": _gated(F.gelu),
    "geglu tanh": _gated(lambda gate: F.gelu(gate, approximate="tanh")),
    "sigmoid gate": _gated(torch.sigmoid),
    "tanh gate": _gated(torch.tanh),
    "softplus gate": _gated(F.softplus),
    "clamped, interleaved": _interleaved,
    "squared relu": _squared_relu,
}
# The operations before and after them.
FORMS = ("plain", "biases", "weights first", "weights last", "returned", "biases, returned", "low rank")


def expert_segment(activation: str, form: str, inputs: ExpertInputs) -> GraphModule:
    """Return a graph from `inputs.tensors()` to one tensor [pairs, hidden], for inputs of these shapes."""
    act = ACTIVATIONS[activation]

    def product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        import transformers.integrations.moe  # noqa: F401  # registers the operator

        result: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights.transpose(1, 2), ends)
        return result

    def compute(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = ExpertInputs(*tensors)
        rows = _rows(call.x, call.token)
        if form == "weights first":
            rows = rows * call.weight
        both = product(rows, call.up, call.ends)
        if form == "low rank":
            inner = product(rows, call.up_in, call.ends)
            both = both + 0.5 * product(inner, call.up_out, call.ends)
        if form.startswith("biases"):
            both = both + _rows(call.up_bias, call.expert)
        result = product(act(both), call.down, call.ends)
        if form.startswith("biases"):
            result = result + _rows(call.down_bias, call.expert)
        if form == "weights last" or form.endswith("returned"):
            result = result * call.weight
        if form.endswith("returned"):
            inverse = torch.empty_like(call.order)
            places = torch.arange(call.order.shape[0], device=call.order.device)
            result = _rows(result, torch.ops.aten.index_put.default(inverse, [call.order], places))
        return (result,)

    # Fake tensors, such as those on an absent GPU, stay fake.
    if isinstance(inputs.x, FakeTensor):
        return make_fx(compute)(*inputs.tensors())
    return make_fx(compute, tracing_mode="fake")(*inputs.tensors())

"""Expert computations as models write them, traced as graphs: for tests and benchmarks of kernels."""

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
    """`pairs` of a token and an expert; `rank` is that of low-rank deltas."""

    tokens: int
    pairs: int
    experts: int
    hidden: int
    width: int
    dtype: torch.dtype = torch.float32
    rank: int = 8


@dataclasses.dataclass
class ExpertInputs:
    """Tensors of one call.

    x [tokens, hidden]; token and expert [pairs] of each pair, sorted by expert; order [pairs], the pair's number in
    the order of tokens; ends [experts] int32;
    weight [pairs, 1]; matrices [experts, out, in]; where they are `turned`, `in` is the outer dimension in memory
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
    """Random inputs. `shares` [experts] says how likely a pair goes to each expert; None: all alike.

    On the device `meta` they have shapes alone.
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
    # Python's indexing would ask for the device, which fake tensors do not need.
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


# What stands between the two GEMMs, by name.
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
# What stands around them.
FORMS = ("plain", "biases", "weights first", "weights last", "returned", "biases, returned", "low rank")


def expert_segment(activation: str, form: str, inputs: ExpertInputs) -> GraphModule:
    """A graph from `inputs.tensors()` to one tensor [pairs, hidden], for inputs of these shapes."""
    act = ACTIVATIONS[activation]

    def product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        import transformers.integrations.moe  # noqa: F401  # registers the operator

        result: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights.transpose(1, 2), ends)
        return result

    def compute(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = ExpertInputs(*tensors)
        rows = _rows(given.x, given.token)
        if form == "weights first":
            rows = rows * given.weight
        both = product(rows, given.up, given.ends)
        if form == "low rank":
            inner = product(rows, given.up_in, given.ends)
            both = both + 0.5 * product(inner, given.up_out, given.ends)
        if form.startswith("biases"):
            both = both + _rows(given.up_bias, given.expert)
        result = product(act(both), given.down, given.ends)
        if form.startswith("biases"):
            result = result + _rows(given.down_bias, given.expert)
        if form == "weights last" or form.endswith("returned"):
            result = result * given.weight
        if form.endswith("returned"):
            inverse = torch.empty_like(given.order)
            places = torch.arange(given.order.shape[0], device=given.order.device)
            result = _rows(result, torch.ops.aten.index_put.default(inverse, [given.order], places))
        return (result,)

    # What is fake already, as a tensor on a GPU that is not there, stays what it is.
    if isinstance(inputs.x, FakeTensor):
        return make_fx(compute)(*inputs.tensors())
    return make_fx(compute, tracing_mode="fake")(*inputs.tensors())

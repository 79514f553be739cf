"""Sizes of a model's layers, for all families, from which costs follow. `families.py` reads them.

Equal layers are equal records, so that the cost of a layer is computed once per kind of layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from moepass.models.errors import InputError
from moepass.models.sizes.weight_formats import WeightFormat

if TYPE_CHECKING:
    import torch

ATTENTION_KINDS = ("full", "sliding", "chunked", "linear", "state_space")

# Names in plans, profiles and on the command line, by torch's names.
DTYPES: Mapping[str, str] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


@dataclasses.dataclass(frozen=True)
class Latent:
    """Latent attention (MLA): key-value pairs, and queries if `query_rank` is set, are compressed to a rank.

    `position_dim` is the part of `Attention.head_dim` that carries the position; its key is shared by all heads.
    """

    query_rank: int | None
    kv_rank: int
    position_dim: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """The token mixer of a layer.

    Attributes:
        kind: `full` sees all earlier tokens, `sliding` the last `window` (itself included), `chunked` those in its
            chunk of `window` tokens. `linear` is the gated delta rule, `state_space` a selective scan (Mamba)
        heads: heads of queries; for `linear` value heads, for `state_space` channels
        kv_heads: heads of keys and values; for `linear` heads of queries and keys
        head_dim: width of a head; for `state_space` the states of a channel
        output_gate: the query projection also computes a gate of the same width
        convolution: for `linear` and `state_space`, width of the convolution before it
        time_step_rank: for `state_space`, rank of the time steps
        other_parameters: parameters outside GEMMs: biases, norms, sinks, decays
    """

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None = None
    latent: Latent | None = None
    output_gate: bool = False
    convolution: int = 0
    time_step_rank: int = 0
    other_parameters: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ATTENTION_KINDS:
            raise InputError.unknown("kind", self.kind, ATTENTION_KINDS)
        if (self.window is not None) != (self.kind in ("sliding", "chunked")):
            raise InputError(
                f"attention of kind {self.kind!r} has window {self.window}; sliding and chunked attention need a "
                "window, other kinds have none",
                name="kind",
                value=self.kind,
            )
        for name in ("heads", "kv_heads", "head_dim", "value_head_dim", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                text = f"{name} of attention is {value}; it must be 1 or more"
                raise InputError(text, name=name, value=value, expected="1 or more")

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of all keys of a token."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of all values of a token: one per head in linear attention, one per kv head in softmax attention."""
        return (self.heads if self.kind == "linear" else self.kv_heads) * self.value_head_dim

    @property
    def output_width(self) -> int:
        """Width of the outputs of all heads."""
        return self.heads * self.value_head_dim


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a layer.

    Attributes:
        shared_width: width of all shared experts together; 0 without shared experts
        gated: an expert has three matrices, else two
        bias: the experts' GEMMs have biases, which are part of the bank
        shared_gate: the output of the shared experts is weighted by a separate gate
    """

    count: int
    top_k: int
    width: int
    shared_width: int = 0
    gated: bool = True
    bias: bool = False
    shared_gate: bool = False
    router_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.count:
            text = f"top_k is {self.top_k}; it must lie between 1 and the number of experts, {self.count}"
            raise InputError(text, name="top_k", value=self.top_k, expected=range(1, self.count + 1))


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer: attention, then experts or a gated MLP of `dense_width`. `norms` counts its norm weights."""

    attention: Attention
    experts: Experts | None
    dense_width: int | None
    norms: int = 0

    def __post_init__(self) -> None:
        if (self.experts is None) == (self.dense_width is None):
            text = f"dense_width is {self.dense_width} and experts is {self.experts}; a layer has one of the two"
            raise InputError(text, name="dense_width", value=self.dense_width)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The sizes of a language model.

    Attributes:
        dtype: dtype of the weights, after dequantisation; a value of `DTYPES`
        other_parameters: parameters of the last norm and the head's bias
        stored: how the checkpoint stores most matrices, if it is quantised
        unknown_storage: why `stored` is missing although the checkpoint is quantised
    """

    name: str
    model_type: str
    hidden: int
    vocab: int
    dtype: str
    layers: tuple[Layer, ...]
    tied_embeddings: bool = False
    other_parameters: int = 0
    stored: WeightFormat | None = None
    unknown_storage: str = ""

    @functools.cached_property
    def layer_counts(self) -> dict[Layer, int]:
        """Number of layers of each kind, in the order of first occurrence."""
        return dict(Counter(self.layers))

    @functools.cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.experts is not None)

    @functools.cached_property
    def typical_moe_layer(self) -> Layer:
        """The most frequent kind of layer with experts. Raises InputError for a model without experts."""
        kinds = [layer for layer in self.layer_counts if layer.experts is not None]
        if not kinds:
            raise InputError(f"{self.name} has no layer with experts", name=self.name)
        return max(kinds, key=self.layer_counts.__getitem__)


def short_dtype(dtype: str | torch.dtype) -> str:
    """Return `bf16` for torch.bfloat16, and so on. Raises InputError for other dtypes."""
    name = str(dtype).removeprefix("torch.")
    if name in DTYPES.values():
        return name
    if name not in DTYPES:
        raise InputError.unknown("dtype", name, dict.fromkeys((*DTYPES, *DTYPES.values())))
    return DTYPES[name]

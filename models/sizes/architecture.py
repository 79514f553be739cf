"""Sizes of a model's layers, from which costs follow, for all families. `families.py` reads them.

Equal layers are equal records, so that what a layer costs is computed once per kind and not once per layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from moepass.models.errors import InputError, one_of
from moepass.models.sizes.weight_formats import WeightFormat

if TYPE_CHECKING:
    import torch

ATTENTION_KINDS = ("full", "sliding", "chunked", "linear", "state_space")

# The names that plans, profiles and the command line use, by torch's.
DTYPES: Mapping[str, str] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


@dataclasses.dataclass(frozen=True)
class Latent:
    """Latent attention (MLA): queries and key-value pairs pass through ranks; `query_rank` None: queries do not.

    `position_dim` is the part of `Attention.head_dim` that carries the position; its key is shared by all heads.
    """

    query_rank: int | None
    kv_rank: int
    position_dim: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """How a layer mixes tokens.

    `full` sees all tokens before, `sliding` the last `window` (its own included), `chunked` those of its own chunk of
    `window` tokens. `linear` is the gated delta rule: `heads` are value heads, `kv_heads` those of queries and keys,
    `convolution` the width of the convolution before. `state_space` is a selective scan (Mamba): `heads` channels of
    `head_dim` states each, time steps of rank `time_step_rank`. With `output_gate` the query projection gives a gate of
    the same width too. `other_parameters` are those outside GEMMs: biases, norms, sinks, decays.
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
            raise InputError(
                f"attention of kind {self.kind!r} is unknown; the kinds are {one_of(ATTENTION_KINDS)}",
                name="kind",
                value=self.kind,
                expected=tuple(ATTENTION_KINDS),
            )
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
                raise InputError(
                    f"{name} of attention is {value}; it must be 1 or more",
                    name=name,
                    value=value,
                    expected="1 or more",
                )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """All values of a token; linear attention has a value for every head, softmax attention one per kv head."""
        return (self.heads if self.kind == "linear" else self.kv_heads) * self.value_head_dim

    @property
    def output_width(self) -> int:
        return self.heads * self.value_head_dim


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a layer: `width` is one expert's, `shared_width` that of all shared ones together (0: none).

    A gated expert has three matrices, another one two. `shared_gate`: the shared experts' output is weighted by a
    gate of its own. `bias`: the experts' GEMMs have biases, which lie in the bank. `router_bias`: so has the
    router.
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
            raise InputError(
                f"top_k is {self.top_k}; it must lie between 1 and the number of experts, {self.count}",
                name="top_k",
                value=self.top_k,
                expected=range(1, self.count + 1),
            )


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer: attention, then experts or a gated MLP of `dense_width`. `norms`: its own norm weights."""

    attention: Attention
    experts: Experts | None
    dense_width: int | None
    norms: int = 0

    def __post_init__(self) -> None:
        if (self.experts is None) == (self.dense_width is None):
            raise InputError(
                f"dense_width is {self.dense_width} and experts is {self.experts}; a layer has one of the two",
                name="dense_width",
                value=self.dense_width,
            )


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A language model. `dtype` is a value of `DTYPES`; `other_parameters` are the last norm and the head's bias.

    `stored` is how the checkpoint stores most matrices, where it quantised them: `dtype` is what they are after
    dequantisation. `unknown_storage` says why `stored` is None although the checkpoint is quantised.
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
        """How often each kind of layer occurs, in the order of first occurrence."""
        return dict(Counter(self.layers))

    @functools.cached_property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(index for index, layer in enumerate(self.layers) if layer.experts is not None)

    @functools.cached_property
    def typical_moe_layer(self) -> Layer:
        """The most frequent kind of layer with experts. Raises InputError where there is none."""
        kinds = [layer for layer in self.layer_counts if layer.experts is not None]
        if not kinds:
            raise InputError(f"{self.name} has no layer with experts", name=self.name)
        return max(kinds, key=self.layer_counts.__getitem__)


def short_dtype(dtype: str | torch.dtype) -> str:
    """`bf16` for torch.bfloat16 and its like. Raises InputError for what is no dtype of weights."""
    name = str(dtype).removeprefix("torch.")
    if name in DTYPES.values():
        return name
    if name not in DTYPES:
        raise InputError(
            f"dtype {name!r} is unknown; it must be one of {one_of({*DTYPES, *DTYPES.values()})}",
            name="dtype",
            value=name,
            expected=(*DTYPES, *DTYPES.values()),
        )
    return DTYPES[name]

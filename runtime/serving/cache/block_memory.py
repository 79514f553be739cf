"""The memory of cached prefix blocks: keys and values of every attention layer, allocated once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS


@dataclasses.dataclass(frozen=True, slots=True)
class KeyValueShape:
    """The shape of the keys and values of one token in an attention layer.

    Both dimensions differ with latent attention (MLA), whose keys and values are expanded before the attention
    function.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


class BlockMemory:
    """The memory of `count` cache blocks of `BLOCK_TOKENS` tokens.

    Block b of layer l is `keys[l][b]`, [BLOCK_TOKENS, kv_heads, key_dim], and `values[l][b]` accordingly. Layers may
    have different shapes. `BlockIndex` decides which tokens a block holds.
    """

    def __init__(self, layers: Sequence[KeyValueShape], count: int, device: torch.device | str = "cpu") -> None:
        self.layers, self.count = tuple(layers), count
        # Uninitialised memory may hold NaN, and a masked weight of 0 times NaN is NaN.
        self.keys, self.values = (
            [
                _zeros((count, BLOCK_TOKENS, shape.kv_heads, dim), shape.dtype, torch.device(device))
                for shape, dim in ((shape, shape.key_dim if is_key else shape.value_dim) for shape in self.layers)
            ]
            for is_key in (True, False)
        )

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of `blocks` [m], each [m · BLOCK_TOKENS, kv_heads, dim]."""
        return self.keys[layer][blocks].flatten(0, 1), self.values[layer][blocks].flatten(0, 1)

    def read_slots(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of the cache slots `slots` [m], each [m, kv_heads, dim]."""
        return self.keys[layer].flatten(0, 1)[slots], self.values[layer].flatten(0, 1)[slots]

    def write(
        self, layer: int, blocks: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Fill `blocks` [m] with rows of a step's `keys` and `values` [n, kv_heads, dim].

        `positions` [m, BLOCK_TOKENS] are the rows of each block. Raises InputError if keys or values do not have the
        shape of the layer.
        """
        shape = self.layers[layer]
        actual = KeyValueShape(keys.shape[1], keys.shape[2], values.shape[2], keys.dtype)
        if actual != shape:
            text = f"layer {layer} produces keys and values of {actual}; the cache was built for {shape}"
            raise InputError(text, name=f"layer {layer}")
        self.keys[layer][blocks] = keys[positions]
        self.values[layer][blocks] = values[positions]


def block_bytes(layers: Sequence[KeyValueShape]) -> int:
    """Return the bytes of one block in all `layers`."""
    numbers = ((layer.kv_heads * (layer.key_dim + layer.value_dim), layer.dtype) for layer in layers)
    return BLOCK_TOKENS * sum(count * dtype.itemsize for count, dtype in numbers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU, pages are only allocated on the first write, so an empty cache takes no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)

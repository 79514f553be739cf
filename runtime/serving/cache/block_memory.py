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
    """What an attention layer keeps of a token: `kv_heads` keys of `key_dim` numbers, as many values of `value_dim`.

    Both dims differ with latent attention (MLA), whose keys and values are expanded before attention sees them.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class BlockMemory:
    """Blocks of `BLOCK_TOKENS` tokens; block b of layer l is `keys[l][b]`, [BLOCK_TOKENS, kv_heads, key_dim].

    Values likewise. Which block holds what is not known here. Layers may differ in shape; a block has a place in each.
    """

    def __init__(self, layers: Sequence[KeyValueShape], limit_bytes: int, device: torch.device | str = "cpu") -> None:
        """Allocate as many blocks as fit into `limit_bytes`. Raises InputError if not one does."""
        self.layers = tuple(layers)
        self.block_bytes = block_bytes(layers)
        self.count = limit_bytes // self.block_bytes if self.block_bytes else 0
        if self.count < 1:
            raise InputError(
                f"{limit_bytes} bytes hold no block of the cache; one of {BLOCK_TOKENS} tokens in "
                f"{len(self.layers)} layers takes {self.block_bytes}",
                name="limit_bytes",
                value=limit_bytes,
                expected=self.block_bytes,
            )
        # Zeros, not what the memory held before: a masked weight of 0 times NaN would be NaN.
        self.keys, self.values = (
            [
                _zeros((self.count, BLOCK_TOKENS, one.kv_heads, dim), one.dtype, torch.device(device))
                for one, dim in ((one, one.key_dim if is_key else one.value_dim) for one in self.layers)
            ]
            for is_key in (True, False)
        )

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a chain of `blocks` [m], an index tensor: two copies [m · BLOCK_TOKENS, kv_heads, dim]."""
        return self.keys[layer][blocks].flatten(0, 1), self.values[layer][blocks].flatten(0, 1)

    def write(
        self, layer: int, blocks: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Fill `blocks` [m] from rows `positions` [m, BLOCK_TOKENS] of a step's `keys` and `values` [n, kv_heads, dim].

        Raises InputError where these are of another shape than the layer's.
        """
        shape = self.layers[layer]
        given = KeyValueShape(keys.shape[1], keys.shape[2], values.shape[2], keys.dtype)
        if given != shape:
            raise InputError(
                f"layer {layer} gives {given}; the cache was built for {shape}",
                name=f"layer {layer}",
                value=given,
                expected=shape,
            )
        self.keys[layer][blocks] = keys[positions]
        self.values[layer][blocks] = values[positions]


def block_bytes(layers: Sequence[KeyValueShape]) -> int:
    """Bytes of one block in all `layers`."""
    return BLOCK_TOKENS * sum(layer.token_bytes for layer in layers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU the pages are taken when they are first written to, so that an empty cache takes no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)

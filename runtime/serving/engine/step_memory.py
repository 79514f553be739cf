"""The device's memory of a server, as one sum: weights and slots, a step, and the cache of keys and values.

Pseudo-code
    limit = the memory budget, or a share of the memory that is free
    before loading    the planner takes a full step and the cache off the limit, and fills the rest with resident layers
    after loading     the cache takes its part of what weights and slots leave; steps take the rest
"""

from __future__ import annotations

import bisect
import dataclasses

import psutil
import torch

from moepass.models.formulas.memory import element_bytes
from moepass.models.limits import MOST_TOKENS
from moepass.models.sizes.architecture import DTYPES, Architecture, Attention
from moepass.passes.ir.planner_decisions import NO_MEMORY, DeviceMemory
from moepass.passes.planner.strategies import peak_activation_bytes
from moepass.runtime.serving.attention.survey import AttentionLayer
from moepass.runtime.serving.attention.trie_memory import held_mask_bytes, trie_bytes
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.cache.block_memory import KeyValueShape, block_bytes
from moepass.runtime.serving.engine.token_scores import logits_bytes

# [Empirical] Part of the free memory that a server takes by default. Other programs use the memory of a CPU too; on a
# GPU, torch's allocator and the libraries need a part.
USABLE_SHARE = {"cpu": 0.5, "cuda": 0.9}
# [Empirical] Part of the memory budget, or of the free memory, that the cache takes by default, and its largest size:
# more blocks hardly hold more prefixes.
CACHE_SHARE = 0.1
MOST_CACHE_BYTES = 4 << 30
# Layers that are no attention over a trie: their models run padded rows.
_RECURRENT = ("linear", "state_space")


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The sizes of a model and its device that decide the memory of a step.

    Attributes:
        token_bytes: activations of the layers for a token.
        layers: all attention layers over the trie, each with the index 0; empty if steps are padded rows.
        width: outputs of the head for a token, 0 without a head.
        state_bytes: bytes of the state that the head reads.
    """

    token_bytes: float
    layers: tuple[AttentionLayer, ...]
    width: int
    state_bytes: int
    device_type: str

    @staticmethod
    def of(architecture: Architecture, dtype: str, device_type: str) -> StepSizes:
        """Return the sizes of a model that predicts tokens, with weights of `dtype`, before it is loaded."""
        attentions = [layer.attention for layer in architecture.layers]
        is_trie = not any(attention.kind in _RECURRENT for attention in attentions)
        return StepSizes(
            peak_activation_bytes(architecture, 1, dtype),
            tuple(_attention_layer(attention, dtype) for attention in attentions) if is_trie else (),
            architecture.vocab,
            architecture.hidden * element_bytes(dtype),
            device_type,
        )

    def memory(self, tokens: int, cache_bytes: float, weights: DeviceMemory = NO_MEMORY) -> DeviceMemory:
        """Return the memory of a step of `tokens` tokens and of the cache, beside `weights` and slots."""
        kinds = set(self.layers)
        # A chain of cached blocks is at most as long as the cache.
        blocks = cache_bytes // block_bytes([layer.shape for layer in self.layers]) if kinds else 0
        context_tokens = int(blocks) * BLOCK_TOKENS
        attention = max((trie_bytes(kind, tokens, self.device_type, context_tokens) for kind in kinds), default=0)
        masks = held_mask_bytes(tokens) * len({kind.past for kind in kinds})
        logits = logits_bytes(tokens, self.width, self.device_type) if self.width else 0
        return DeviceMemory(
            resident_bytes=weights.resident_bytes,
            slot_bytes=weights.slot_bytes,
            activation_bytes=tokens * self.token_bytes,
            kv_bytes=float(cache_bytes),
            attention_bytes=float(attention + masks),
            # States are read as they are, and as vectors in fp32.
            logits_bytes=float(logits + 3 * tokens * self.state_bytes),
        )

    def most_tokens(self, room_bytes: float, cache_bytes: float) -> int:
        """Return the tokens of the largest step for which `room_bytes` suffice, besides the cache; 0 if none does."""

        def step_bytes(tokens: int) -> float:
            return self.memory(tokens, cache_bytes).step_bytes

        return bisect.bisect_right(range(1, MOST_TOKENS + 1), room_bytes, key=step_bytes)


def _attention_layer(attention: Attention, dtype: str) -> AttentionLayer:
    """Return `attention` as a survey finds it; its index in the cache does not matter here."""
    windows = {
        "sliding": VisiblePast(window=attention.window or 0),
        "chunked": VisiblePast(chunk=attention.window or 0),
    }
    dtypes = {short: getattr(torch, name) for name, short in DTYPES.items()}
    shape = KeyValueShape(attention.kv_heads, attention.head_dim, attention.value_head_dim, dtypes[dtype])
    return AttentionLayer(0, attention.heads, shape, windows.get(attention.kind, VisiblePast()))


@dataclasses.dataclass(frozen=True)
class MemoryShare:
    """The memory of a device that one process may take.

    Attributes:
        free_bytes: its part of the memory that is free now.
        all_bytes: its part of the complete memory.
        budget_bytes: the memory budget, None without one.
    """

    free_bytes: int
    all_bytes: int
    budget_bytes: float | None
    device_type: str

    @staticmethod
    def of(device: torch.device, sharers: int, budget_bytes: float | None) -> MemoryShare:
        """Return the share of one of `sharers` processes on `device`."""
        if device.type == "cuda":
            free_bytes, all_bytes = torch.cuda.mem_get_info(device)
        else:
            memory = psutil.virtual_memory()
            free_bytes, all_bytes = int(memory.available), int(memory.total)
        return MemoryShare(free_bytes // sharers, all_bytes // sharers, budget_bytes, device.type)

    @property
    def cache_bytes(self) -> int:
        """The default size of the cache."""
        basis = self.free_bytes if self.budget_bytes is None else self.budget_bytes
        return min(MOST_CACHE_BYTES, int(CACHE_SHARE * basis))

    def limit_bytes(self, weights: DeviceMemory) -> float:
        """Return the limit of the sum for a loaded model, whose `weights` are on the device, and its slots not yet."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        return weights.resident_bytes + USABLE_SHARE[self.device_type] * self.free_bytes

"""The memory of cached blocks: its size, writes and reads."""

from __future__ import annotations

import torch

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.cache.block_memory import BlockMemory, KeyValueShape, block_bytes
from tests.helpers.graphs.error_fields import refused

# A layer of latent attention, and a layer of another shape.
LAYERS = (KeyValueShape(4, 24, 16, torch.float32), KeyValueShape(2, 8, 8, torch.bfloat16))
BLOCK_BYTES = 16 * (4 * (24 + 16) * 4 + 2 * (8 + 8) * 2)


def test_a_block_takes_the_bytes_of_its_keys_and_values() -> None:
    assert block_bytes(LAYERS) == BLOCK_BYTES
    memory = BlockMemory(LAYERS, 3)
    assert [tuple(tensor.shape) for tensor in (*memory.keys, *memory.values)] == [
        (3, 16, 4, 24),
        (3, 16, 2, 8),
        (3, 16, 4, 16),
        (3, 16, 2, 8),
    ]
    assert sum(tensor.nbytes for tensor in (*memory.keys, *memory.values)) == 3 * BLOCK_BYTES


def test_blocks_are_read_as_they_were_written() -> None:
    memory = BlockMemory(LAYERS, 4)
    keys, values = torch.randn(50, 4, 24), torch.randn(50, 4, 16)
    positions = torch.stack([torch.arange(30, 30 + BLOCK_TOKENS), torch.arange(3, 3 + BLOCK_TOKENS)])
    memory.write(0, torch.tensor([3, 1]), positions, keys, values)
    stored = memory.read(0, torch.tensor([1, 3]))
    order = positions.flip(0).flatten()
    assert torch.equal(stored[0], keys[order])
    assert torch.equal(stored[1], values[order])
    slots = torch.tensor([1 * BLOCK_TOKENS + 2, 3 * BLOCK_TOKENS])
    for tensor, of_slots in zip((keys, values), memory.read_slots(0, slots), strict=True):
        assert torch.equal(of_slots, tensor[[5, 30]])
    # Other blocks are unchanged, and reads return copies.
    assert not memory.keys[0][[0, 2]].any()
    assert not memory.keys[1].any()
    stored[0].zero_()
    assert torch.equal(memory.read(0, torch.tensor([3]))[0], keys[positions[0]])


def test_keys_of_another_shape_are_refused() -> None:
    memory = BlockMemory(LAYERS, 1)
    block, positions = torch.tensor([0]), torch.arange(BLOCK_TOKENS)[None]
    for keys in (torch.zeros(20, 4, 16), torch.zeros(20, 2, 24), torch.zeros(20, 4, 24, dtype=torch.float16)):
        with refused(InputError, name="layer 0"):
            memory.write(0, block, positions, keys, torch.zeros(20, 4, 16))
    assert not memory.keys[0].any()

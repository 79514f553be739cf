"""A sample of a tensor's bytes shows changes of the whole tensor, reads no other memory, and is cheap."""

from __future__ import annotations

import pytest
import torch

from moepass.runtime.system.tensor_memory import sampled_bytes

LARGE = torch.arange(64 * 33, dtype=torch.float32).view(64, 33)


@pytest.mark.parametrize(
    "tensor",
    [
        LARGE,
        LARGE.t(),
        LARGE[::2, 1::3],
        LARGE[:, :1],
        LARGE[:1].expand(1000, -1),
        LARGE.to(torch.bfloat16),
        LARGE[0, :3],
        torch.tensor(1.5),
    ],
    ids=["whole", "transposed", "strided", "column", "expanded", "bfloat16", "small", "number"],
)
def test_a_sample_changes_with_the_tensor(tensor: torch.Tensor) -> None:
    written = tensor.clone(memory_format=torch.preserve_format)
    before = sampled_bytes(written)
    assert before == sampled_bytes(written)
    written.data.mul_(2).add_(1)
    assert sampled_bytes(written) != before


def test_a_sample_ends_where_the_tensor_ends() -> None:
    """The memory before and after a view does not belong to it."""
    memory = torch.zeros(1000)
    for view in (memory[400:600], memory[400:600:3], memory[400:410], memory[400:400]):
        before = sampled_bytes(view)
        memory[:400], memory[600:] = 1.0, 1.0
        assert sampled_bytes(view) == before
        memory.zero_()


def test_a_sample_has_the_first_and_the_last_number() -> None:
    for index in (0, 999):
        tensor = torch.zeros(1000)
        before = sampled_bytes(tensor)
        tensor[index] = 1.0
        assert sampled_bytes(tensor) != before

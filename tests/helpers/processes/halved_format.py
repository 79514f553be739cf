"""A format of banks that transforms bytes, for tests: bf16 values in fp32 tensors, stored in half of the bytes.

slot    fp32 values
link    the upper two bytes of each value: all upper bytes, then all lower bytes, each XORed with KEY
home    the same, and a trailer that is never transferred
"""

from __future__ import annotations

import torch

from moepass.models.errors import InputError
from moepass.runtime.kernels.decoders import Codec, register_codec

NAME = "halved"
KEY = 0x5A
TRAILER = b"a trailer that stays at home"


def encode(slot: torch.Tensor) -> torch.Tensor:
    """Return the bytes at rest for fp32 values that bf16 can represent. Gaps between tensors are lost."""
    words = slot.view(-1, 4)
    planes = words[:, 2:].t().contiguous().view(-1) ^ KEY
    return torch.cat([planes, torch.frombuffer(bytearray(TRAILER), dtype=torch.uint8)])


def decode(link: torch.Tensor, slot: torch.Tensor) -> None:
    words = slot.view(-1, 4)
    words[:, :2] = 0
    words[:, 2:] = (link ^ KEY).view(2, -1).t()


CODEC = Codec(encode, lambda home_bytes: home_bytes - len(TRAILER), decode)
register_codec(NAME, CODEC)


def halve(module: torch.nn.Module) -> None:
    """Round the parameters of `module` to values that the format can store."""
    for parameter in module.parameters():
        if parameter.dtype != torch.float32:
            raise InputError(f"a parameter is {parameter.dtype}; the format holds float32")
        parameter.data = parameter.data.bfloat16().float()

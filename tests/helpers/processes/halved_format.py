"""A format of banks that really transforms bytes, for tests: bf16 numbers in fp32 tensors, as half of the bytes.

slot    fp32 numbers
link    the upper two bytes of each, all upper ones and then all lower ones, every byte by exclusive or with KEY
home    the same, and a trailer that never travels
"""

from __future__ import annotations

import torch

from moepass.models.errors import InputError
from moepass.runtime.kernels.decoders import Codec, register_codec

NAME = "halved"
KEY = 0x5A
TRAILER = b"a trailer that stays at home"


def encode(slot: torch.Tensor) -> torch.Tensor:
    """Bytes at rest, of fp32 numbers that bf16 can hold. The gaps between tensors hold anything, and are not kept."""
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
    """Round the parameters of `module` to what the format holds."""
    for parameter in module.parameters():
        if parameter.dtype != torch.float32:
            raise InputError(f"a parameter is {parameter.dtype}; the format holds float32")
        parameter.data = parameter.data.bfloat16().float()

"""Formats in which banks rest and travel, by the name of their decoder: tensors in, tensors out.

`encode` runs once, where a bank is packed. `decode` runs on the side of the copies: on a CPU in the copy thread, on
CUDA on the copy stream, where it may take memory from the allocator but must not wait for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from moepass.models.errors import InputError, one_of


@dataclasses.dataclass(frozen=True)
class Codec:
    """All tensors are flat uint8 and contiguous.

    encode        bytes of a slot, in host memory -> bytes at rest; raises InputError where they would not come back
    link_bytes    bytes at rest -> how many of them travel, from the first on
    decode        bytes of the link, bytes of the slot: writes the latter, all on one device
    """

    encode: Callable[[torch.Tensor], torch.Tensor]
    link_bytes: Callable[[int], int]
    decode: Callable[[torch.Tensor, torch.Tensor], None]


_codecs: dict[str, Codec] = {}


def register_codec(name: str, codec: Codec) -> None:
    """Register the decoder of this format. Raises InputError if its name is taken."""
    if not name or _codecs.setdefault(name, codec) is not codec:
        raise InputError(f"a decoder cannot be called {name!r}: it must have a name, and one that no other has")


def codec_of(name: str) -> Codec:
    """Raises InputError where there is none."""
    if name not in _codecs:
        raise InputError(f"decoder is {name!r}; registered are {one_of(sorted(_codecs)) if _codecs else 'none'}")
    return _codecs[name]


__all__ = ["Codec", "codec_of", "register_codec"]

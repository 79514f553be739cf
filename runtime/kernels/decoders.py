"""The formats of banks at rest and on the link, by the name of their decoder.

`encode` runs once, when a bank is packed. `decode` runs with the copies: on a CPU in the copy thread, on CUDA on the
copy stream, where it may allocate memory but must not wait for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from moepass.models.errors import InputError, one_of


@dataclasses.dataclass(frozen=True)
class Codec:
    """The functions of one format. All tensors are flat uint8 and contiguous.

    `encode` returns the bytes at rest for the bytes of a slot, in host memory, and raises InputError if decoding would
    not restore them. `link_bytes` returns how many of the bytes at rest travel, from the first on. `decode` writes the
    bytes of the slot (second argument) from the bytes of the link (first), on one device.
    """

    encode: Callable[[torch.Tensor], torch.Tensor]
    link_bytes: Callable[[int], int]
    decode: Callable[[torch.Tensor, torch.Tensor], None]


_codecs: dict[str, Codec] = {}


def register_codec(name: str, codec: Codec) -> None:
    """Register the decoder of a format. Raises InputError if the name is empty or taken."""
    if not name or _codecs.setdefault(name, codec) is not codec:
        raise InputError(f"a decoder cannot be called {name!r}: its name must be unique and not empty")


def codec_of(name: str) -> Codec:
    """Return the codec registered as `name`. Raises InputError if no codec has that name."""
    if name not in _codecs:
        raise InputError(f"decoder is {name!r}; the registered decoders are {one_of(_codecs) or 'none'}")
    return _codecs[name]

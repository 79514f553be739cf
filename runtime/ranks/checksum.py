"""A checksum of the contents of a tensor."""

from __future__ import annotations

import torch

# Words of 8 bytes in a chunk. On a CPU two chunks fit into the cache; on a device a chunk is large enough to hide the
# launch overhead.
_CHUNK_WORDS_CPU = 2**16
_CHUNK_WORDS_DEVICE = 2**22
_ALL_BITS = 2**64 - 1
# The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), and its step.
_STEP = 0x9E3779B97F4A7C15
_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def checksum(tensor: torch.Tensor) -> int:
    """Return 64 bits computed from all bits of `tensor`, in the order of its elements, on its device.

    It is the sum modulo 2^64 of `_mix` of each word of 8 bytes and its position. (In a plain weighted sum two flipped
    signs could cancel out.) A difference in a single word always changes it, other differences almost certainly. It is
    not secure against chosen inputs. It needs the memory of two chunks, and of a copy if the tensor is not contiguous.
    """
    octets = _octets(tensor)
    whole_bytes = octets.numel() // 8 * 8
    # A view may begin at an address that is not a multiple of 8.
    aligned = octets[:whole_bytes] if octets.storage_offset() % 8 == 0 else octets[:whole_bytes].clone()
    words = aligned.view(torch.int64)
    length = _CHUNK_WORDS_CPU if words.device.type == "cpu" else _CHUNK_WORDS_DEVICE
    steps = torch.arange(min(length, words.numel()), device=words.device, dtype=torch.int64).mul_(_signed(_STEP))
    mixed, shifted = torch.empty_like(steps), torch.empty_like(steps)
    total = torch.zeros((), device=words.device, dtype=torch.int64)
    for start in range(0, words.numel(), length):
        chunk = words[start : start + length]
        result = mixed[: chunk.numel()]
        torch.add(steps[: chunk.numel()], _signed((start + 1) * _STEP), out=result)
        result.bitwise_xor_(chunk)
        _mix(result, shifted[: chunk.numel()])
        total += result.sum()
    tail = int.from_bytes(bytes(octets[whole_bytes:].tolist()), "little")
    return (int(total) + _mixed(tail ^ _mixed(octets.numel()))) & _ALL_BITS


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `tensor`, in the order of its elements."""
    # A conjugate or negative may be a view that stores other bits.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return flat.view(torch.uint8) if flat.numel() else flat.new_zeros(0, dtype=torch.uint8)


def _mix(words: torch.Tensor, shifted: torch.Tensor) -> None:
    """Replace each of `words` (int64) by a number, one to one, so that every bit depends on all of its bits.

    `shifted` is scratch memory of the same size.
    """
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        # A shift of a signed number inserts copies of its sign, which are masked out.
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_(_ALL_BITS >> shift))
        if factor is not None:
            words.mul_(_signed(factor))


def _mixed(word: int) -> int:
    """Return the result of `_mix` for one number below 2^64."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        word = (word ^ (word >> shift)) * factor & _ALL_BITS
    return word


def _signed(word: int) -> int:
    """Return the signed 64-bit number with the same bits."""
    word &= _ALL_BITS
    return word - 2**64 if word >> 63 else word

"""A number that is equal for tensors with equal contents, and by all likelihood for no others."""

from __future__ import annotations

import torch

# Words of 8 bytes that are mixed at a time: two copies of a chunk stay in a processor's cache, and on a device a chunk
# is large enough to be worth its launches.
_CHUNK_WORDS_CPU = 2**16
_CHUNK_WORDS_DEVICE = 2**22
_ALL_BITS = 2**64 - 1
# The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), and its step.
_STEP = 0x9E3779B97F4A7C15
_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def checksum(tensor: torch.Tensor) -> int:
    """A number of 64 bits from all bits of `tensor`, in the order of its elements, computed on its device.

    The sum modulo 2^64 of what `_mix` makes of each word of 8 bytes, which depends on the word's place. A mere weighted
    sum would not do: in it two flipped signs cancel out. A difference in one word always shows, others by all
    likelihood. No protection against somebody who looks for equal checksums. Beside the tensor itself it takes the
    memory of two chunks, and that of a copy where the tensor is not contiguous.
    """
    octets = _octets(tensor)
    whole = octets.numel() // 8 * 8
    # Memory of a view need not begin where an integer of 8 bytes may.
    aligned = octets[:whole] if octets.storage_offset() % 8 == 0 else octets[:whole].clone()
    words = aligned.view(torch.int64)
    length = _CHUNK_WORDS_CPU if words.device.type == "cpu" else _CHUNK_WORDS_DEVICE
    places = torch.arange(min(length, words.numel()), device=words.device, dtype=torch.int64).mul_(_signed(_STEP))
    mixed, shifted = torch.empty_like(places), torch.empty_like(places)
    total = torch.zeros((), device=words.device, dtype=torch.int64)
    for start in range(0, words.numel(), length):
        chunk = words[start : start + length]
        part = mixed[: chunk.numel()]
        torch.add(places[: chunk.numel()], _signed((start + 1) * _STEP), out=part)
        part.bitwise_xor_(chunk)
        _mix(part, shifted[: chunk.numel()])
        total += part.sum()
    rest = int.from_bytes(bytes(octets[whole:].tolist()), "little")
    return (int(total) + _mixed(rest ^ _mixed(octets.numel()))) & _ALL_BITS


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes [bytes] of `tensor`, in the order of its elements."""
    # Conjugates and negatives may be views of other numbers.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return flat.view(torch.uint8) if flat.numel() else flat.new_zeros(0, dtype=torch.uint8)


def _mix(words: torch.Tensor, shifted: torch.Tensor) -> None:
    """Replace each of `words` (int64), one to one, by a number whose every bit depends on all of its bits.

    `shifted` is memory of the same size to work in.
    """
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        # Shifts of signed numbers bring copies of the sign, which do not belong there.
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_(_ALL_BITS >> shift))
        if factor is not None:
            words.mul_(_signed(factor))


def _mixed(word: int) -> int:
    """The result of `_mix` for one number below 2^64."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        word = (word ^ (word >> shift)) * factor & _ALL_BITS
    return word


def _signed(word: int) -> int:
    """The signed number of 64 bits with the same bits."""
    word &= _ALL_BITS
    return word - 2**64 if word >> 63 else word

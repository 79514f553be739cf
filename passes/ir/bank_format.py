"""Sizes of a bank at rest in its home, on the link, and in the slot, where kernels read it.

    home    bytes at rest; the first `link_bytes` of them travel, and only the home needs the others
    link    bytes that travel: into the slot if the format has no decoder, else into an encoded buffer of the ring
    slot    bytes that the decoder writes, on a separate stream or thread

Sizes are in bytes and describe a complete bank, independent of the number of its shards.
"""

from __future__ import annotations

import dataclasses

from moepass.models.errors import InputError
from moepass.models.formulas.stored_weights import BankSizes

# While a bank is decoded from one encoded buffer, the next one is copied into the other. Only one bank is copied at a
# time, and only one is decoded, so that banks of equal size need no third buffer.
ENCODED_BUFFERS = 2


def ring_bytes(slots: int, slot_bytes: int, encoded_buffer_bytes: int) -> int:
    """Return the bytes of a ring of `slots` slots, whose encoded buffers have `encoded_buffer_bytes` each."""
    return slots * slot_bytes + ENCODED_BUFFERS * encoded_buffer_bytes


@dataclasses.dataclass(frozen=True)
class BankFormat(BankSizes):
    """The three sizes of a bank, and the name of the decoder from link bytes to slot bytes.

    `decoder` is empty if the bytes are the same everywhere. Raises InputError if sizes without a decoder differ, or if
    more bytes would travel than rest.
    """

    decoder: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.link_bytes <= self.home_bytes or self.slot_bytes < 0:
            raise InputError(
                f"a bank has {self.home_bytes} bytes at rest, {self.link_bytes} on the link and {self.slot_bytes} in "
                "the slot; the link can have at most the bytes at rest, and no size can be negative"
            )
        if not self.decoder and not self.home_bytes == self.link_bytes == self.slot_bytes:
            raise InputError(
                f"a bank without a decoder has {self.home_bytes} bytes at rest, {self.link_bytes} on the link and "
                f"{self.slot_bytes} in the slot; without a decoder the three must be equal"
            )

    @staticmethod
    def plain(nbytes: int) -> BankFormat:
        """Return the format without a decoder."""
        return BankFormat(nbytes, nbytes, nbytes)

    def __add__(self, other: BankFormat) -> BankFormat:
        """Return the sizes of this bank and one in the same format together."""
        sums = (self.home_bytes + other.home_bytes, self.link_bytes + other.link_bytes)
        return BankFormat(*sums, self.slot_bytes + other.slot_bytes, self.decoder)

    @property
    def is_encoded(self) -> bool:
        """True if a decode runs between copy and acquire."""
        return bool(self.decoder)

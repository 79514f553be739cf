"""A bank's bytes in three places: at rest in its home, on the link, and in the slot, where kernels read it.

    home    the first `link_bytes` of what rests travel; behind them may be what the home alone needs
    link    without a decoder the bytes go straight into the slot; else into the ring's encoded buffer
    slot    what the decoder makes of the bytes in the encoded buffer, on the side of the copies

Sizes are those of a complete bank, in bytes, whatever the number of its shards.
"""

from __future__ import annotations

import dataclasses

from moepass.models.errors import InputError


@dataclasses.dataclass(frozen=True)
class BankFormat:
    """The three sizes of a bank; `decoder` names what makes slot bytes of link bytes, and is empty where they are the
    same bytes.

    Raises InputError where sizes without a decoder differ, or more would travel than rests.
    """

    home_bytes: int
    link_bytes: int
    slot_bytes: int
    decoder: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.link_bytes <= self.home_bytes or self.slot_bytes < 0:
            raise InputError(
                f"a bank of {self.home_bytes} bytes at rest, {self.link_bytes} on the link and {self.slot_bytes} in "
                "the slot; no more can travel than rests, and no size is below 0"
            )
        if not self.decoder and not self.home_bytes == self.link_bytes == self.slot_bytes:
            raise InputError(
                f"a bank of {self.home_bytes} bytes at rest, {self.link_bytes} on the link and {self.slot_bytes} in "
                "the slot has no decoder; without one the three are equal"
            )

    @staticmethod
    def plain(nbytes: int) -> BankFormat:
        """The same bytes everywhere."""
        return BankFormat(nbytes, nbytes, nbytes)

    @property
    def is_encoded(self) -> bool:
        """Whether a decode stands between copy and acquire."""
        return bool(self.decoder)

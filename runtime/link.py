"""The link between a bank's home and its slot: the real one, or one of an emulated speed."""

from __future__ import annotations

import dataclasses
import math

from moepass.models.errors import OptionError


@dataclasses.dataclass(frozen=True)
class Link:
    """`bytes_per_s` is None for the real link: copies take the time that they take."""

    bytes_per_s: float | None = None

    @property
    def is_emulated(self) -> bool:
        return self.bytes_per_s is not None

    def seconds(self, nbytes: int) -> float:
        """The least time that a transfer of `nbytes` takes; 0 for the real link."""
        return 0.0 if self.bytes_per_s is None else nbytes / self.bytes_per_s

    def __str__(self) -> str:
        return "real" if self.bytes_per_s is None else f"emulated at {self.bytes_per_s:.3g} bytes/s"


def parse_link(text: str) -> Link:
    """`real`, or `emulate:BYTES_PER_S` as in `emulate:5e9`. Raises OptionError for everything else."""
    if text == "real":
        return Link()
    kind, _, rate = str(text).partition(":")
    try:
        bytes_per_s = float(rate)
    except ValueError:
        bytes_per_s = math.nan
    if kind != "emulate" or not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
        raise OptionError(f"link is {text!r}; it must be `real` or `emulate:BYTES_PER_S`, as in `emulate:5e9`")
    return Link(bytes_per_s)

"""The link between a bank's home and its slot: the real one, or one of an emulated speed."""

from __future__ import annotations

import dataclasses
import math
import threading
import time

import torch

from moepass.models.errors import OptionError
from moepass.models.limits import LEAST_RATE

# [Empirical] How much later than asked for a thread wakes up, at most: a link that is used again so soon had no pause.
_LATE_SECONDS = 0.002
# [Empirical] Seconds per byte before anything was moved, those of a slow disk, and the part of the newest measurement.
_FIRST_SECONDS_PER_BYTE, _NEWEST = 1e-9, 0.25


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


class BusyLink:
    """A link that moves one thing after the other, whichever threads ask for them: what waits its turn takes longer."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._seconds_per_byte = _FIRST_SECONDS_PER_BYTE

    def moved(self, nbytes: int, began: float, abandoned: threading.Event) -> None:
        """`nbytes` were copied from `began` on (of `time.perf_counter`): return when the link is done with them too,
        or when `abandoned` is set.
        """
        with self._lock:
            started = self._free_at if began - self._free_at < _LATE_SECONDS else began
            self._free_at = done = started + self.link.seconds(nbytes)
        remaining = done - time.perf_counter()
        if remaining > 0:
            abandoned.wait(remaining)
        if nbytes:
            newest = (time.perf_counter() - began) / nbytes
            self._seconds_per_byte += _NEWEST * (newest - self._seconds_per_byte)

    def expected_seconds(self, nbytes: int) -> float:
        """Seconds that `nbytes` would take now, estimated from the last transfers."""
        return max(self.link.seconds(nbytes), nbytes * self._seconds_per_byte)


def check_link_to(device: torch.device, link: Link) -> None:
    """Raises OptionError where `link` is none that copies to `device` can have."""
    if link.is_emulated and device.type != "cpu":
        raise OptionError(
            f"link is {link}, which exists for device cpu only; the device is {device}", name="link", value=str(link)
        )


def parse_link(text: str, option: str = "link") -> Link:
    """`real`, or `emulate:BYTES_PER_S` as in `emulate:5e9`. Raises OptionError for everything else; it calls the text
    `option`.
    """
    if text == "real":
        return Link()
    kind, _, rate = str(text).partition(":")
    try:
        bytes_per_s = float(rate)
    except ValueError:
        bytes_per_s = math.nan
    if kind != "emulate" or not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
        raise OptionError.wrong(option, text, "`real` or `emulate:BYTES_PER_S`, as in `emulate:5e9`")
    if bytes_per_s < LEAST_RATE:
        raise OptionError(
            f"{option} is {text!r}; the slowest link that can be emulated has {LEAST_RATE:g} bytes/s",
            name=option,
            value=text,
            expected=LEAST_RATE,
        )
    return Link(bytes_per_s)

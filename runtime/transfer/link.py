"""The link between the home of a bank and its slot: the real one, or an emulated one of a given speed."""

from __future__ import annotations

import dataclasses
import math
import threading
import time

import torch

from moepass.models.errors import OptionError
from moepass.models.limits import LEAST_RATE

# [Empirical] A thread wakes up at most this late, so a link that is used again within this time had no pause.
_LATE_SECONDS = 0.002
# [Empirical] Seconds per byte before the first transfer, those of a slow disk, and the weight of the newest transfer.
_FIRST_SECONDS_PER_BYTE, _NEWEST = 1e-9, 0.25


@dataclasses.dataclass(frozen=True)
class Link:
    """A link for copies. The real link, whose copies are not delayed, has no `bytes_per_s`."""

    bytes_per_s: float | None = None

    @property
    def is_emulated(self) -> bool:
        """True if the speed is emulated."""
        return self.bytes_per_s is not None

    def seconds(self, nbytes: int) -> float:
        """Return the least time that a transfer of `nbytes` takes, in seconds; 0 for the real link."""
        return 0.0 if self.bytes_per_s is None else nbytes / self.bytes_per_s

    def __str__(self) -> str:
        return "real" if self.bytes_per_s is None else f"emulated at {self.bytes_per_s:.3g} bytes/s"


class BusyLink:
    """A link shared by several threads. It carries one transfer after the other, so a transfer may have to queue."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._seconds_per_byte = _FIRST_SECONDS_PER_BYTE

    def moved(self, nbytes: int, began: float, abandoned: threading.Event) -> None:
        """Block until an emulated link has moved `nbytes`, from `began` (perf_counter) on, or `abandoned` is set."""
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
        """Return the seconds that `nbytes` would take now, estimated from the last transfers."""
        return max(self.link.seconds(nbytes), nbytes * self._seconds_per_byte)


def check_link_to(device: torch.device, link: Link) -> None:
    """Raise OptionError if copies to `device` cannot use `link`: emulated links exist on CPUs only."""
    if link.is_emulated and device.type != "cpu":
        text = f"link is {link}, which works on device cpu only; the device is {device}; use link 'real'"
        raise OptionError(text, name="link", value=str(link))


def parse_link(text: str, option: str = "link") -> Link:
    """Return the link that `text` describes: `real`, or `emulate:BYTES_PER_S` as in `emulate:5e9`.

    Raises OptionError if the text is neither, or the speed is too low. The message calls the text `option`.
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
        message = f"{option} is {text!r}; an emulated link needs at least {LEAST_RATE:g} bytes/s"
        raise OptionError(message, name=option, value=text, expected=LEAST_RATE)
    return Link(bytes_per_s)

"""A clock for emulated links: time passes only when a link lets it pass, so durations are exact on any machine.

clock = EmulatedClock(monkeypatch)
copy.perform(Link(1000.0))
assert clock.seconds == nbytes / 1000.0
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from moepass.runtime.homes import collective
from moepass.runtime.homes.hybrid import staged_pull
from moepass.runtime.transfer import copying, lanes, link


class EmulatedClock:
    """A replacement for the module `time` in copies and links. Waits with a timeout return at once.

    With `waits_for_reader`, time passes on a link only while a reader waits for the copy to finish.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits_for_reader: bool = False) -> None:
        self.seconds = 0.0
        self.reader_waits = threading.Event()
        if not waits_for_reader:
            self.reader_waits.set()
        for module in (collective, copying, lanes, link, staged_pull):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(copying, "threading", SimpleNamespace(**{**vars(threading), "Event": self.event}))

    def perf_counter(self) -> float:
        return self.seconds

    def event(self) -> EmulatedEvent:
        return EmulatedEvent(self)


class EmulatedEvent(threading.Event):
    """An event whose wait with a timeout advances `clock` by that timeout."""

    def __init__(self, clock: EmulatedClock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            self.clock.reader_waits.set()
            return super().wait()
        if not self.is_set():
            assert self.clock.reader_waits.wait(60), "no reader waits for the copy"
            self.clock.seconds += timeout
        return self.is_set()

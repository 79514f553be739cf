"""Background threads have ended when the interpreter exits; a thread that has not may abort the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import atexit, threading

# Registered first, so called last: after it the interpreter goes.
atexit.register(lambda: print(sorted(thread.name for thread in threading.enumerate())))

import torch
from moepass.runtime.transfer.copying import CopyThread, SlotCopy
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import whole

threads = [CopyThread(Link(1.0)) for _ in range(2)]
memory = torch.frombuffer(bytearray(1 << 16), dtype=torch.uint8)
copies = [
    thread.submit(SlotCopy([whole(memory)], torch.empty_like(memory), "x")) for thread in threads for _ in range(3)
]
assert not any(copy.finished.is_set() for copy in copies)
print("copies take 18 hours each")
"""


@pytest.mark.slow
def test_copies_are_abandoned_and_threads_joined_when_the_process_ends() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["copies take 18 hours each", "['MainThread']"]), done

"""Run a check in a forked child of this process."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable


def in_child(check: Callable[[], bool]) -> None:
    """Run `check` in a forked child for at most 20 seconds, and check that it returns True."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(0 if check() else 1)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

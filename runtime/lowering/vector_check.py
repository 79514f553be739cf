"""Ask beside the capture what Inductor asks before its first kernel for a CPU: which vector instructions it may use.

The answer takes a compilation and a process that loads what came of it, seconds in which Inductor does nothing else.
Inductor keeps what it finds for the rest of the process.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator

logger = logging.getLogger("moepass")


@contextlib.contextmanager
def vector_check() -> Iterator[Callable[[], None]]:
    """The question is asked in a thread, which has ended when this block ends; gives a function that waits for it.

    An error in the block comes out of it once the thread has ended.
    """
    # Imported here, because two threads must not import at the same time what imports each other.
    from torch._inductor import codecache as codecache
    from torch._inductor import cpp_builder as cpp_builder
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    def ask() -> None:
        try:
            pick_vec_isa()
        except Exception as error:
            # Inductor will ask again, and raise where the caller sees it.
            logger.debug("no answer about vector instructions: %s: %s", type(error).__name__, error)

    # In this context, because it holds what the caller has changed in Inductor's configuration.
    asking = threading.Thread(target=contextvars.copy_context().run, args=(ask,), name="moepass-vector-check")
    asking.start()
    try:
        yield asking.join
    finally:
        asking.join()

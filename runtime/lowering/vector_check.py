"""Ask for the vector instructions of the CPU while Dynamo captures, as Inductor does before its first CPU kernel.

The answer takes seconds, in which Inductor compiles a test program and starts a process that loads it. Inductor caches
the answer in this process.
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
    """Ask in a thread, and yield a function that waits for it. The thread has ended when the block ends.

    An error in the block is raised after the thread has ended.
    """
    # Imported here, because two threads must not import modules at the same time that import each other.
    from torch._inductor import codecache as codecache
    from torch._inductor import cpp_builder as cpp_builder
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    def ask() -> None:
        try:
            pick_vec_isa()
        except Exception as error:
            # Inductor will ask again, and its error reaches the caller.
            logger.debug("no answer about vector instructions: %s: %s", type(error).__name__, error)

    # A copy of this context has the caller's changes of Inductor's configuration.
    asking = threading.Thread(target=contextvars.copy_context().run, args=(ask,), name="moepass-vector-check")
    asking.start()
    try:
        yield asking.join
    finally:
        asking.join()

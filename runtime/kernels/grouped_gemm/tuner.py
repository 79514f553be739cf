"""Measures which tile sizes are fastest on a GPU: only if a program asks for it, never in a request.

Sizes are tried one after the other on the operands of a real call, while copies run as usual.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch

from moepass.models.errors import InputError
from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes
from moepass.runtime.kernels.grouped_gemm.tuned_tiles import KernelIdentity, MeasuredTile, TunedKernel

logger = logging.getLogger("moepass")

Launch = Callable[[], None]
# Returns the seconds of one launch.
Timer = Callable[[Launch], float]
_LAUNCHES = 9

_timer: contextvars.ContextVar[Timer | None] = contextvars.ContextVar("timer", default=None)


def seconds_on_gpu(launch: Launch) -> float:
    """Return the median of several launches on the current stream, after a first one that compiles.

    Raises InputError without a GPU.
    """
    if not torch.cuda.is_available():
        raise InputError("tuning kernels needs a GPU, but this process sees none", expected=("cuda",))
    launch()
    spans = []
    for _ in range(_LAUNCHES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch()
        end.record()
        spans.append((begin, end))
    torch.cuda.current_stream().synchronize()
    milliseconds: float = statistics.median(begin.elapsed_time(end) for begin, end in spans)
    return milliseconds / 1e3


@contextlib.contextmanager
def tune_kernels(timer: Timer = seconds_on_gpu) -> Iterator[None]:
    """Tune the expert kernels that this thread runs in the block, except those tuned earlier.

    Each takes seconds, mostly to compile. Results are stored in the cache folder, for later processes on the same kind
    of GPU. Other sizes add in another order, so the last bits of results may change.
    """
    token = _timer.set(timer)
    try:
        yield
    finally:
        _timer.reset(token)


def active_timer() -> Timer | None:
    """Return the timer of `tune_kernels`; None outside it, and while a CUDA graph is recorded, which cannot wait."""
    timer = _timer.get()
    if timer is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    return timer


def tune(
    identity: KernelIdentity, candidates: Sequence[TileSizes], launch: Callable[[TileSizes], None], timer: Timer
) -> TunedKernel:
    """Time all `candidates` and return the result. Sizes that do not fit the GPU are skipped.

    Raises the error of the last candidate if none fits.
    """
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    measured: list[MeasuredTile] = []
    problem: Exception | None = None
    for sizes in candidates:
        try:
            measured.append(MeasuredTile(sizes, timer(lambda sizes=sizes: launch(sizes))))  # type: ignore[misc]
        except (CompilationError, OutOfResources, PTXASError) as error:
            problem = error
            measured.append(MeasuredTile(sizes, None, f"{type(error).__name__}: {error}".partition("\n")[0]))
    timed = [(tile.seconds, index) for index, tile in enumerate(measured) if tile.seconds is not None]
    if not timed:
        assert problem is not None
        raise problem
    seconds, index = min(timed)
    fastest = measured[index].sizes
    logger.info("tuned for %d rows per expert: %s, %.3g s", identity.rows_per_expert, fastest, seconds)
    return TunedKernel(identity, fastest, measured)

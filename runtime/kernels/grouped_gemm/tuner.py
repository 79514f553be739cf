"""Measures which tile sizes are fastest on a GPU: only if a program asks for it, never in a request.

Sizes are tried one after the other on the operands of a real call, while copies run as usual. The results are stored in
the cache folder for later processes: one JSON file for each kernel, GPU, version of Triton and number of rows per
expert, rounded up to a power of two. Sizes are used only if they are among the candidates of the kernel, so a file
cannot introduce others.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from moepass.models.errors import InputError
from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes
from moepass.runtime.system.own_files import UnusableFileError, read_own, write_own

logger = logging.getLogger("moepass")

SCHEMA = "moepass.tiles/1"
_SUFFIX = ".tiles.json"
_MOST_BYTES = 1 << 20

Launch = Callable[[], None]
# Returns the seconds of one launch.
Timer = Callable[[Launch], float]
_LAUNCHES = 9

_timer: contextvars.ContextVar[Timer | None] = contextvars.ContextVar("timer", default=None)


class KernelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The facts on which the fastest sizes depend.

    Attributes:
        source: A digest of the generated kernel.
        layout: The dimension of the weights that is contiguous, "inner" or "columns"; else "strided".
        rows_per_expert: See `rows_bucket`.
    """

    source: str
    dtype: str
    precision: str
    inner: int
    width: int
    experts: int
    layout: str
    rows_per_expert: int
    gpu: str
    capability: tuple[int, int]
    triton: str

    def key(self) -> str:
        """Return a digest of all fields, for the name of a file."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


class MeasuredTile(msgspec.Struct, frozen=True):
    """The time of one launch, or why the kernel cannot be launched with these sizes."""

    sizes: TileSizes
    seconds: float | None
    problem: str = ""


class TunedKernel(msgspec.Struct, frozen=True):
    """The content of one file: the fastest sizes, and all measurements."""

    identity: KernelIdentity
    fastest: TileSizes
    measured: list[MeasuredTile]
    schema: str = SCHEMA


def rows_bucket(rows: int, experts: int) -> int:
    """Return the mean number of rows of an expert, rounded up to a power of two."""
    return 1 << (max(1, -(-rows // experts)) - 1).bit_length()


class TunedTiles:
    """The tuned sizes in `folder`, which is made when the first kernel is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, identity: KernelIdentity, allowed: Sequence[TileSizes]) -> TileSizes | None:
        """Return the fastest sizes of a tuned kernel, else None. Logs a warning about a file that cannot be used."""
        path = self._path(identity)
        if not path.exists():
            return None
        try:
            tuned = msgspec.json.decode(read_own(path, _MOST_BYTES), type=TunedKernel)
            if tuned.schema != SCHEMA:
                raise UnusableFileError(f"its schema is {tuned.schema!r}; this version reads {SCHEMA!r}")
            if tuned.identity != identity:
                raise UnusableFileError("it was stored for another kernel")
            if tuned.fastest not in allowed:
                raise UnusableFileError(
                    f"its fastest sizes are {tuned.fastest}, which this version of moepass does not use"
                )
        except (UnusableFileError, msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = error if isinstance(error, UnusableFileError) else f"it is damaged: {error}"
            logger.warning("tuned tile sizes in %s are ignored, and default sizes used: %s", path, problem)
            return None
        return tuned.fastest

    def save(self, tuned: TunedKernel) -> None:
        """Store the sizes of a kernel. Logs a warning if that fails, because no kernel depends on it."""
        path = self._path(tuned.identity)
        try:
            write_own(path, msgspec.json.format(msgspec.json.encode(tuned)) + b"\n")
        except (OSError, UnusableFileError) as error:
            logger.warning("tuned tile sizes are not stored in %s: %s", path, error)

    def files(self) -> list[Path]:
        """Return the files of all tuned kernels; none if the folder does not exist."""
        return sorted(self.folder.glob(f"*{_SUFFIX}"))

    def _path(self, identity: KernelIdentity) -> Path:
        return self.folder / f"{identity.key()}{_SUFFIX}"


def seconds_on_gpu(launch: Launch) -> float:
    """Return the median of launches on the current stream, after one that compiles. Raises InputError without a GPU."""
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
    """Time all `candidates` that fit the GPU and return the result. Raises the error of the last one if none fits."""
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

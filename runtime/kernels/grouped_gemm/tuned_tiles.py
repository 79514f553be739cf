"""Tile sizes that were measured to be fast, in the cache folder for later processes: one JSON file per kernel.

A file is for one kernel, GPU, version of Triton and number of rows per expert, rounded up to a power of two. Sizes are
used only if they are among the candidates of the kernel, so a file cannot introduce others.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes
from moepass.runtime.system.own_files import UnusableFileError, find_cache_folder, read_own, write_own

logger = logging.getLogger("moepass")

SCHEMA = "moepass.tiles/1"
_SUFFIX = ".tiles.json"
_MOST_BYTES = 1 << 20


class KernelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The facts on which the fastest sizes depend.

    Attributes:
        source: A digest of the generated kernel.
        layout: The dimension of the weights that is contiguous, "inner" or "columns"; else "strided".
        rows_per_expert: The mean number of rows, rounded up to a power of two.
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
    """The time of one launch.

    Attributes:
        seconds: None if the kernel cannot be launched with these sizes.
        problem: Why not.
    """

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
            tuned = _decoded(read_own(path, _MOST_BYTES))
            if tuned.identity != identity:
                raise UnusableFileError("it was stored for another kernel")
            if tuned.fastest not in allowed:
                raise UnusableFileError(f"this version does not use {tuned.fastest}")
        except UnusableFileError as error:
            logger.warning("tuned tile sizes in %s are ignored, and default sizes used: %s", path, error)
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


def find_tuned_tiles() -> TunedTiles | None:
    """Return the tuned sizes in the cache folder; None if there is no such folder."""
    folder = find_cache_folder()
    return None if folder is None else TunedTiles(folder)


def _decoded(content: bytes) -> TunedKernel:
    try:
        tuned = msgspec.json.decode(content, type=TunedKernel)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableFileError(f"it is damaged: {error}") from error
    if tuned.schema != SCHEMA:
        raise UnusableFileError(f"its schema is {tuned.schema!r}; this version reads {SCHEMA!r}")
    return tuned

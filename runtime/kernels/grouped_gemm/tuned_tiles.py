"""Sizes of tiles that were measured to be fast, kept in the cache folder for later processes: one JSON file per kernel.

A file is for one kernel, GPU, version of Triton and number of rows per expert, up to the next power of two. Sizes are
used only if they are among those that the kernel may have, whatever a file says.
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
    """What the fastest sizes depend on.

    source            a digest of the generated kernel
    layout            "inner" or "columns": the dimension of the weights that is contiguous; else "strided"
    rows_per_expert   the mean number of rows, up to the next power of two
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
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


class MeasuredTile(msgspec.Struct, frozen=True):
    """Seconds of one launch; None where it cannot be launched, because of `problem`."""

    sizes: TileSizes
    seconds: float | None
    problem: str = ""


class TunedKernel(msgspec.Struct, frozen=True):
    """What one file holds: the fastest sizes, and all that were measured."""

    identity: KernelIdentity
    fastest: TileSizes
    measured: list[MeasuredTile]
    schema: str = SCHEMA


def rows_bucket(rows: int, experts: int) -> int:
    """The mean number of rows of an expert, up to the next power of two."""
    return 1 << (max(1, -(-rows // experts)) - 1).bit_length()


class TunedTiles:
    """The table in `folder`, which is made when the first kernel is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, identity: KernelIdentity, allowed: Sequence[TileSizes]) -> TileSizes | None:
        """The fastest sizes, if this kernel was tuned. A file that cannot be used is reported in the log."""
        path = self._path(identity)
        if not path.exists():
            return None
        try:
            found = _decoded(read_own(path, _MOST_BYTES))
            if found.identity != identity:
                raise UnusableFileError("it was stored for another kernel")
            if found.fastest not in allowed:
                raise UnusableFileError(f"this version does not use {found.fastest}")
        except UnusableFileError as error:
            logger.warning("tuned sizes of tiles in %s are ignored, the default ones are used: %s", path, error)
            return None
        return found.fastest

    def save(self, tuned: TunedKernel) -> None:
        """Where that fails, the log says why: a kernel does not depend on it."""
        path = self._path(tuned.identity)
        try:
            write_own(path, msgspec.json.format(msgspec.json.encode(tuned)) + b"\n")
        except (OSError, UnusableFileError) as error:
            logger.warning("tuned sizes of tiles are not stored in %s: %s", path, error)

    def files(self) -> list[Path]:
        """Empty where there is no folder."""
        return sorted(self.folder.glob(f"*{_SUFFIX}"))

    def _path(self, identity: KernelIdentity) -> Path:
        return self.folder / f"{identity.key()}{_SUFFIX}"


def find_tuned_tiles() -> TunedTiles | None:
    """The table in the cache folder; None where nothing is kept there."""
    folder = find_cache_folder()
    return None if folder is None else TunedTiles(folder)


def _decoded(content: bytes) -> TunedKernel:
    try:
        found = msgspec.json.decode(content, type=TunedKernel)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableFileError(f"it is damaged: {error}") from error
    if found.schema != SCHEMA:
        raise UnusableFileError(f"its schema is {found.schema!r}; this version reads {SCHEMA!r}")
    return found

"""Home `disk`: experts stay in files, and a bank is read into its slot when the schedule asks for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch

from moepass.models.checkpoint.unread_tensors import UnreadTensor
from moepass.models.checkpoint.weight_recipes import UnfollowedError
from moepass.models.errors import InputError
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import Piece
from moepass.runtime.banks.banks import Bank, describe_bank, resting_tensors
from moepass.runtime.homes.disk.bank_files import BankFolder
from moepass.runtime.homes.disk.block_reader import LEAST_AHEAD_BYTES, BankSources, BlockReader, BlockSource
from moepass.runtime.homes.disk.disk_files import DiskFile, FileSource
from moepass.runtime.system.background import run_in_background
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.learned_order import LearnedOrder
from moepass.runtime.transfer.sources import Source

# Values of `moepass.Disk(page_cache=...)`.
AUTO, KEEP, DROP = "auto", "keep", "drop"
PAGE_CACHES = (AUTO, KEEP, DROP)


class ReadAhead:
    """A thread that announces sources to the kernel, so that a disk reads the next bank during the copy of this one.

    Of the sources that are waiting it announces only the latest. Announcing takes time: the kernel allocates memory for
    every page, and blocks if the disk is busy. On platforms without these calls nothing is announced.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Sequence[FileSource] | None] | None = None

    def announce(self, sources: Sequence[FileSource]) -> None:
        """Queue `sources`; returns at once."""
        if not (hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")):
            return
        with self._lock:
            if self._queue is None:
                self._queue = queue.SimpleQueue()
                # The thread references only the queue, so that it does not keep its owner alive.
                stop = functools.partial(self._queue.put, None)
                run_in_background(functools.partial(_announce_from, self._queue), stop, "moepass-read-ahead")
                weakref.finalize(self, stop)
        self._queue.put(sources)


def _announce_from(announcements: queue.SimpleQueue[Sequence[FileSource] | None]) -> None:
    while (sources := announcements.get()) is not None:
        if not announcements.empty():
            continue
        for source in sources:
            # Announcing is advice. A later read of the file reports the error.
            with contextlib.suppress(OSError):
                source.announce()
        del sources


class DiskHome(Home):
    """Banks in files. While one is copied, the next one is announced to the kernel, or read ahead by `reader`.

    The next bank is the one that followed the last time; in the first run it is the next layer.
    """

    needs_host = True

    def __init__(self) -> None:
        self.announces = True
        # None if files are read through the kernel's cache.
        self.reader: BlockReader | None = None
        self._sources: dict[int, tuple[FileSource, ...]] = {}
        # The index of the bank of each source.
        self._banks: dict[int, int] = {}
        self._files: list[DiskFile] = []
        self._read_ahead = ReadAhead()
        self._order: LearnedOrder[int, int] = LearnedOrder()

    def add(self, bank: BankSpec, sources: Sequence[FileSource]) -> None:
        """Record the files of `bank`."""
        self._sources[bank.index] = tuple(sources)
        self._banks |= {id(source): bank.index for source in sources}
        self._files = list({id(s.file): s.file for each in self._sources.values() for s in each}.values())

    def check(self) -> None:
        """Raise CheckpointError if one of the files was changed. Makes one system call for each file."""
        for file in self._files:
            file.check()

    def sources(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """Return the ranges of files that contain the bank."""
        return self._sources[bank.index]

    def copying(self, bank: BankSpec) -> None:
        """Learn the order of banks, and announce the next one to the kernel, unless `reader` reads it ahead."""
        self._order.learn(bank.index, bank.index)
        following = self._following(bank.index)
        if self.reader is None and following is not None:
            self._read_ahead.announce(following)

    def read_past_the_cache(self, ahead_bytes: int) -> BlockReader:
        """Make the reader of the banks that are added later."""
        # Sources reference the reader, so it must not reference this object.
        home = weakref.ref(self)

        def expected(source: BlockSource) -> tuple[BankSources, BankSources]:
            if (this := home()) is None:
                return (source,), ()
            index = this._banks[id(source)]
            return this._sources[index], this._following(index) or ()

        self.reader = BlockReader(ahead_bytes, expected)
        return self.reader

    def _following(self, index: int) -> tuple[FileSource, ...] | None:
        """Return the sources of the bank that probably follows bank `index`; None if it is unknown or the same."""
        following = self._order.after(index, index + 1)
        return self._sources.get(following) if self.announces and following != index else None


class DiskPacker:
    """A packer that finds, or writes to `folder`, the files of a model's banks.

    `moepass.Disk` describes `page_cache`. Raises InputError without `preadv`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, page_cache: str = AUTO) -> None:
        if not hasattr(os, "preadv"):
            raise InputError(
                "this platform has no preadv, which home='disk' needs; use home='host'", name="home", value="disk"
            )
        self.home = DiskHome()
        self._folder = None if folder is None else BankFolder(Path(folder))
        self._page_cache = page_cache
        self._files: dict[Path, DiskFile] = {}
        self._specs: list[BankSpec] = []

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Find the files of all banks, and write those that must be written. Does not change the model.

        Raises InputError if banks must be written, but there is no folder, or too little disk space, and
        CheckpointError if files were changed.
        """
        resting = {name: resting_tensors(tensors) for name, tensors in banks.items()}
        made = {name: reason for name, tensors in resting.items() if (reason := why_made(tensors))}
        needed = sum(value.nbytes for name in made for value in resting[name].values())
        if made and self._folder is None:
            name, reason = next(iter(made.items()))
            raise InputError(
                f"{name}{reason}; name a folder with {needed} free bytes, where moepass writes such banks once: "
                "home=moepass.Disk(folder=...)",
                name="folder",
            )
        written = self._folder.write({name: resting[name] for name in made}) if made and self._folder else {}
        pieces_of_banks = []
        for index, (name, tensors) in enumerate(banks.items()):
            experts = next(iter(tensors.values())).shape[0]
            spec = describe_bank(index, name, tensors, home="disk", expert_bounds=(0, experts))
            self._specs.append(spec)
            pieces: dict[DiskFile, list[Piece]] = defaultdict(list)
            if name in made:
                extents = written[name].header.tensors
                pieces[written[name]] = [
                    Piece(extents[f"{name}.{tensor.name}"].offset_bytes, tensor.offset_bytes, tensor.nbytes)
                    for tensor in spec.at_rest.tensors
                ]
            else:
                self._add_pieces_of_checkpoint(spec, resting[name], pieces)
            pieces_of_banks.append(pieces)
        self._add_sources(pieces_of_banks)

    def _add_sources(self, pieces_of_banks: Sequence[Mapping[DiskFile, Sequence[Piece]]]) -> None:
        """Add the sources of all banks to the home, and decide whether they are read through the kernel's cache."""
        nbytes = sum(spec.format.home_bytes for spec in self._specs)
        keeps_pages = self._page_cache == KEEP or (
            self._page_cache == AUTO and nbytes <= psutil.virtual_memory().available
        )
        files = {file for pieces in pieces_of_banks for file in pieces}
        if not keeps_pages and all(file.past_the_cache is not None for file in files):
            # During a decode, the disk reads the next encoded bank.
            encoded = max(spec.format.link_bytes if spec.format.is_encoded else 0 for spec in self._specs)
            self.home.read_past_the_cache(encoded + LEAST_AHEAD_BYTES)
        for spec, pieces in zip(self._specs, pieces_of_banks, strict=True):
            self.home.add(
                spec,
                [
                    FileSource(file, in_file_order(parts), keeps_pages, reader=self.home.reader)
                    for file, parts in pieces.items()
                ],
            )

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        """Return the bank, with a placeholder of one byte as its shard."""
        return Bank(self._specs[index], torch.zeros(1, dtype=torch.uint8))

    def connect(self, banks: Sequence[Bank]) -> None:
        """Do nothing: `agree` has found the files."""
        return

    def _add_pieces_of_checkpoint(
        self, spec: BankSpec, tensors: Mapping[str, torch.Tensor], pieces: dict[DiskFile, list[Piece]]
    ) -> None:
        for tensor_spec, tensor in zip(spec.at_rest.tensors, tensors.values(), strict=True):
            assert isinstance(tensor, UnreadTensor)
            for checked in tensor.recipe.checked():
                checked.read()
            slot_offset = tensor_spec.offset_bytes
            for stored in tensor.recipe.file_ranges():
                path = stored.tensor.file
                file = self._files.get(path) or self._files.setdefault(path, DiskFile(path))
                pieces[file].append(Piece(file.offset_bytes(stored.tensor) + stored.start, slot_offset, stored.nbytes))
                slot_offset += stored.nbytes
            assert slot_offset == tensor_spec.offset_bytes + tensor_spec.nbytes, f"{tensor_spec.name} is incomplete"


def why_made(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return why this bank must be written, as the end of a sentence; empty if files contain it byte for byte."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, UnreadTensor):
            return " is in memory, and home='disk' needs it in files"
        try:
            for _ in tensor.recipe.file_ranges():
                pass
        except UnfollowedError as error:
            return f".{name} is made by {error.operation}, and home='disk' needs a file that contains its bytes"
    return ""


def in_file_order(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the pieces in the order of the file, with pieces that are adjacent in file and slot merged."""
    ordered: list[Piece] = []
    for piece in sorted((piece for piece in pieces if piece.nbytes), key=lambda piece: piece.source_offset_bytes):
        last = ordered[-1] if ordered else None
        if last is not None and (
            last.source_offset_bytes + last.nbytes == piece.source_offset_bytes
            and last.slot_offset_bytes + last.nbytes == piece.slot_offset_bytes
        ):
            ordered[-1] = dataclasses.replace(last, nbytes=last.nbytes + piece.nbytes)
        else:
            ordered.append(piece)
    return tuple(ordered)

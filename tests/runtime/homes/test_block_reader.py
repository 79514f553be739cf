"""Reads past the kernel's cache: every byte arrives, in any order of copies, and an error reaches the copy."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

import moepass
from moepass.passes.ir.shards import Piece
from moepass.runtime.homes.disk import block_reader
from moepass.runtime.homes.disk.block_reader import BlockReader, BlockSource
from moepass.runtime.homes.disk.disk_files import DiskFile, FileSource
from moepass.runtime.homes.disk.disk_home import DiskHome, DiskPacker
from moepass.runtime.transfer.copying import CopyError, CopyThread, SlotCopy
from moepass.runtime.transfer.link import Link
from tests.helpers.graphs.backend_helper import Stack, tokens

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads past the kernel's cache are Linux's")
FILE_BYTES = 200_001
BANKS = 5


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[DiskFile]:
    """Return two files of random bytes, which are read in blocks of two pages."""
    monkeypatch.setattr(block_reader, "BLOCK_BYTES", 2 * block_reader.ALIGNMENT_BYTES)
    generator = torch.Generator().manual_seed(0)
    opened = []
    for name in "ab":
        numbers = torch.randint(0, 256, (FILE_BYTES,), dtype=torch.uint8, generator=generator)
        save_file({"numbers": numbers}, tmp_path / f"{name}.safetensors")
        opened.append(DiskFile(tmp_path / f"{name}.safetensors"))
    if any(file.past_the_cache is None for file in opened):
        pytest.skip("this file system has no reads past the cache")
    return opened


def _banks(files: Sequence[DiskFile], draw: random.Random, ahead_bytes: int) -> list[tuple[FileSource, ...]]:
    """Return banks of one or two sources with pieces in the file's order, each read by the same reader."""

    def expected(source: BlockSource) -> tuple[Sequence[BlockSource], Sequence[BlockSource]]:
        number = next(number for number, bank in enumerate(banks) if source in bank)
        return banks[number], banks[(number + 1) % BANKS]

    reader = BlockReader(ahead_bytes, expected)
    banks = []
    for _ in range(BANKS):
        slot_offset = 0
        sources = []
        for file in draw.sample(list(files), draw.randint(1, 2)):
            ends = sorted(draw.sample(range(file.header.nbytes), 2 * draw.randint(1, 6)))
            pieces = []
            for start, stop in zip(ends[::2], ends[1::2], strict=True):
                pieces.append(Piece(start, slot_offset, stop - start))
                slot_offset += stop - start
            sources.append(FileSource(file, tuple(pieces), reader=reader))
        banks.append(tuple(sources))
    return banks


def _wanted(bank: Sequence[FileSource]) -> bytes:
    return b"".join(
        source.file.path.read_bytes()[piece.source_offset_bytes :][: piece.nbytes]
        for source in bank
        for piece in source.pieces
    )


@pytest.mark.parametrize("seed", range(8))
def test_copies_in_any_order_bring_every_byte(seed: int, files: list[DiskFile]) -> None:
    draw = random.Random(seed)
    banks = _banks(files, draw, draw.choice([1, 50_000, 1_000_000]))
    wanted = [_wanted(bank) for bank in banks]
    thread = CopyThread(Link())
    copies = []
    number = 0
    for _ in range(40):
        # Mostly in order, as the reader expects.
        number = draw.randrange(BANKS) if draw.random() < 0.2 else (number + 1) % BANKS
        slot = torch.zeros(len(wanted[number]), dtype=torch.uint8)
        copy = thread.submit(SlotCopy(banks[number], slot, "layer"))
        if draw.random() < 0.2:
            copy.abandoned.set()
        else:
            copies.append((copy, slot, wanted[number]))
    for copy, slot, expected in copies:
        copy.wait()
        assert slot.numpy().tobytes() == expected


def test_the_expected_bank_is_read_ahead_and_no_further(files: list[DiskFile], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    reading = DiskFile.read_block
    is_full = threading.Event()

    def read_block(self: DiskFile, offset_bytes: int, memory: memoryview) -> None:
        reading(self, offset_bytes, memory)
        read.append(offset_bytes)
        if len(read) == 4:
            is_full.set()

    monkeypatch.setattr(DiskFile, "read_block", read_block)
    banks: list[tuple[FileSource, ...]] = []

    def expected(source: BlockSource) -> tuple[Sequence[BlockSource], Sequence[BlockSource]]:
        return banks[0], banks[1]

    reader = BlockReader(4 * block_reader.BLOCK_BYTES, expected)
    size = block_reader.BLOCK_BYTES
    banks += [
        (FileSource(files[0], (Piece(size, 0, size),), reader=reader),),
        (FileSource(files[0], (Piece(2 * size, 0, 20 * size),), reader=reader),),
    ]
    slot = torch.zeros(size, dtype=torch.uint8)
    CopyThread(Link()).submit(SlotCopy(banks[0], slot, "layer")).wait()
    assert is_full.wait(20)
    time.sleep(0.1)
    # The block that was copied keeps its buffer until the next copy.
    assert sorted(read) == [size, 2 * size, 3 * size, 4 * size]


def test_a_changed_file_is_an_error_of_the_copy(files: list[DiskFile]) -> None:
    (bank, *_) = _banks(files, random.Random(0), 50_000)
    thread = CopyThread(Link())
    path = bank[0].file.path
    os.utime(path, (1, 1))
    for _ in range(2):
        copy = thread.submit(SlotCopy(bank, torch.zeros(len(_wanted(bank)), dtype=torch.uint8), "layer"))
        with pytest.raises(CopyError, match=rf"{path.name} was changed while a model streams from it"):
            copy.wait()


def test_threads_and_descriptors_end_with_the_home(files: list[DiskFile]) -> None:
    before = set(threading.enumerate())
    home = DiskHome()
    reader = home.read_past_the_cache(50_000)
    source = FileSource(files[0], (Piece(100, 0, 20_000),), reader=reader)
    home._sources[0], home._banks[id(source)] = (source,), 0
    slot = torch.zeros(20_000, dtype=torch.uint8)
    source.copy(100, 20_000, slot.data_ptr())
    assert slot.numpy().tobytes() == _wanted([source])
    threads = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("moepass-read-")}
    assert len(threads) == block_reader.READER_THREADS
    gc.disable()  # nothing may need the garbage collector
    try:
        del home, reader, source
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("page_cache", "available", "reads_past"),
    [("keep", 0, False), ("drop", 1 << 40, True), ("auto", 1 << 40, False), ("auto", 0, True)],
)
def test_the_cache_is_bypassed_if_it_is_too_small(
    page_cache: str,
    available: int,
    reads_past: bool,
    files: list[DiskFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Memory:
        pass

    memory = Memory()
    memory.available = available  # type: ignore[attr-defined]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    packer = DiskPacker(tmp_path / "banks", page_cache=page_cache)
    tensors = {"up": torch.randn(4, 6, 8), "down": torch.randn(4, 8, 3)}
    packer.agree({"layers.0": tensors, "layers.1": tensors})
    assert (packer.home.reader is not None) == reads_past
    for index in range(2):
        spec = packer.pack(index, f"layers.{index}", tensors).spec
        slot = torch.zeros(spec.format.slot_bytes, dtype=torch.uint8)
        CopyThread(Link()).submit(SlotCopy(packer.home.sources(spec, []), slot, "layer")).wait()
        for tensor, wanted in zip(spec.tensors, tensors.values(), strict=True):
            assert torch.equal(tensor.view(slot), wanted)


def test_a_model_streams_past_the_cache(tmp_path: Path) -> None:
    model = Stack("dense_bmm", depth=4).eval()
    expected = model(tokens())
    moepass.offload_experts(model, home=moepass.Disk(folder=tmp_path, page_cache="drop"))
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    with torch.no_grad():
        for run in (model, compiled, compiled, compiled):
            assert torch.equal(run(tokens()), expected)

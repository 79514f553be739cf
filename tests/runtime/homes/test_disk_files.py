"""Reads of banks from files: every byte arrives at its offset, and a changed file is an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import moepass
from moepass.models.checkpoint.checkpoint_files import CheckpointFiles
from moepass.models.checkpoint.file_header import make_header, read_header
from moepass.models.checkpoint.unread_tensors import unread
from moepass.passes.ir.shards import Piece
from moepass.runtime.homes.disk import disk_files
from moepass.runtime.homes.disk.disk_files import DiskFile, FileSource
from moepass.runtime.homes.disk.disk_home import PAGE_CACHES, DiskPacker, ReadAhead, in_file_order
from moepass.runtime.transfer import lanes
from moepass.runtime.transfer.copying import CopyError, CopyThread, SlotCopy
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import read_range
from tests.helpers.graphs.error_fields import refused

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="home disk advises the Linux kernel")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def file(tmp_path: Path) -> DiskFile:
    """Save a tensor of the bytes 0 to 255, twice."""
    save_file({"a": torch.arange(512).to(torch.uint8)}, tmp_path / "a.safetensors")
    return DiskFile(tmp_path / "a.safetensors")


def _copied(source: FileSource, nbytes: int) -> list[int]:
    slot = torch.zeros(nbytes, dtype=torch.uint8)
    CopyThread(Link()).submit(SlotCopy([source], slot, "layer")).wait()
    read: list[int] = slot.tolist()
    return read


def test_pieces_go_where_they_belong(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SLICE_BYTES", 3)
    begin = file.header.tensors["a"].offset_bytes
    source = FileSource(file, (Piece(begin + 5, 7, 8), Piece(begin + 100, 0, 4)))
    expected = [100, 101, 102, 103, 0, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12, 0]
    assert _copied(source, 16) == expected
    assert read_range([source], 2, 10, CPU)[:2].tolist() == expected[2:4]
    assert read_range([source], 7, 10, CPU).tolist() == expected[7:10]


def test_a_short_read_is_continued(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, places, offset: preadv(fd, [memoryview(places[0])[:3]], offset))
    begin = file.header.tensors["a"].offset_bytes
    assert _copied(FileSource(file, (Piece(begin, 0, 10),)), 10) == list(range(10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 100), r"had \d+ bytes of .*, now it has 100 bytes"),
        (lambda path: os.utime(path, (1, 1)), r"was changed while a model streams from it.* bytes of 1970-"),
        (lambda path: path.open("ab").write(b"more"), "was changed while a model streams from it"),
    ],
    ids=["truncated", "written", "longer"],
)
def test_a_file_that_is_changed_in_place_is_an_error(
    file: DiskFile, change: Callable[[Path], object], message: str
) -> None:
    file.check()
    change(file.path)
    with pytest.raises(moepass.CheckpointError, match=message):
        file.check()
    with pytest.raises(CopyError, match=f"bank layer could not be copied into its slot: .*{message}") as caught:
        _copied(FileSource(file, (Piece(300, 0, 10),)), 10)
    assert (caught.value.name, caught.value.path) == ("layer", file.path)


def test_a_file_that_ends_early_is_an_error(file: DiskFile) -> None:
    end = file.header.nbytes
    buffer = torch.empty(10, dtype=torch.uint8)
    with refused(moepass.CheckpointError, path=file.path, value=end, expected=end + 6):
        file.read(end - 4, 10, buffer.data_ptr())
    with pytest.raises(CopyError, match=f"of {end} bytes is read up to byte {end + 1}"):
        _copied(FileSource(file, (Piece(end - 4, 0, 5),)), 10)


def test_a_file_that_is_replaced_or_deleted_is_still_there(file: DiskFile, tmp_path: Path) -> None:
    begin = file.header.tensors["a"].offset_bytes
    replacement = tmp_path / "b.safetensors"
    save_file({"a": torch.zeros(512, dtype=torch.uint8)}, replacement)
    os.replace(replacement, file.path)
    file.check()
    assert _copied(FileSource(file, (Piece(begin, 0, 4),)), 4) == [0, 1, 2, 3]
    file.path.unlink()
    file.check()
    assert _copied(FileSource(file, (Piece(begin, 0, 4),)), 4) == [0, 1, 2, 3]


def test_names_and_modes_may_change(file: DiskFile) -> None:
    begin = file.header.tensors["a"].offset_bytes
    for change in (lambda path: path.chmod(0o400), lambda path: os.link(path, path.with_name("link"))):
        before = os.fstat(file.descriptor)
        change(file.path)
        assert os.fstat(file.descriptor) != before
        file.check()
        assert _copied(FileSource(file, (Piece(begin, 0, 4),)), 4) == [0, 1, 2, 3]


def test_a_file_that_was_replaced_while_loading_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4, 3)}, path)
    described = CheckpointFiles([path]).tensors["a"]
    zeros = torch.zeros(4, 3)
    for replacement in ({"b": zeros}, {"a": zeros.view(3, 4)}, {"a": zeros.double()}, {"a": zeros + 1}):
        save_file(replacement, tmp_path / "other")
        os.replace(tmp_path / "other", path)
        with pytest.raises(moepass.CheckpointError, match="was changed or replaced while the model was loaded from it"):
            DiskFile(path).offset_bytes(described)


def test_descriptors_are_closed_with_their_last_user(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    source = FileSource(DiskFile(tmp_path / "a.safetensors"), ())
    descriptor = source.file.descriptor
    os.fstat(descriptor)
    del source
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header would have 0 bytes"),
        (b"\xff" * 64, r"its header would have \d+ bytes"),
        ((16).to_bytes(8, "little") + b"{", "is truncated or not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "is truncated or not a safetensors file"),
        ((12).to_bytes(8, "little") + b'{"a":{"x":1}', "is truncated or not a safetensors file"),
        (make_header({"a": ("U8", (4,), 4)}, {}) + b"abc", r"has \d+ bytes, but its header says \d+: it is truncated"),
    ],
)
def test_an_incomplete_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(moepass.CheckpointError, match=rf"a\.safetensors .*{message}"):
        DiskFile(tmp_path / "a.safetensors")
    with pytest.raises(moepass.CheckpointError, match=r"b\.safetensors cannot be opened: No such file"):
        DiskFile(tmp_path / "b.safetensors")


def test_headers_are_those_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = make_header({"b": ("F32", (2, 1), 8), "a": ("U8", (0,), 0), "c": ("U8", (3,), 3)}, {"key": "value"})
    path.write_bytes(header + torch.tensor([1.5, 2.5]).numpy().tobytes() + bytes([7, 8, 9]))
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"key": "value"}
        assert opened.get_tensor("b").tolist() == [[1.5], [2.5]]
        assert opened.get_tensor("c").tolist() == [7, 8, 9]
    with path.open("rb") as opened:
        file_header = read_header(opened.fileno(), path)
    assert (file_header.metadata, file_header.nbytes) == ({"key": "value"}, path.stat().st_size)
    assert (file_header.tensors["c"].offset_bytes, file_header.tensors["c"].nbytes) == (len(header) + 8, 3)


def _calls(monkeypatch: pytest.MonkeyPatch, advice: int) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []

    def advise(descriptor: int, offset: int, nbytes: int, given: int) -> None:
        if given == advice:
            ranges.append((offset, nbytes))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return ranges


def test_every_byte_that_is_not_cached_is_announced_in_small_steps(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_files, "_ANNOUNCED_AT_ONCE_BYTES", 10)
    monkeypatch.setattr(disk_files, "_ASKED_AT_ONCE_BYTES", 40)
    asked: list[int] = []

    def is_cached(self: DiskFile, offset: int) -> bool:
        asked.append(offset)
        return offset == 140

    monkeypatch.setattr(DiskFile, "_is_cached", is_cached)
    ranges = _calls(monkeypatch, os.POSIX_FADV_WILLNEED)
    # The second piece follows the first one in the file, but not in the slot.
    FileSource(file, (Piece(100, 0, 60), Piece(160, 900, 25), Piece(300, 500, 5))).announce()
    assert asked == [100, 140, 180, 300]
    assert ranges == [(100, 10), (110, 10), (120, 10), (130, 10), (180, 5), (300, 5)]


def test_bytes_just_written_are_cached(file: DiskFile) -> None:
    assert file._is_cached(0)
    assert not file._is_cached(1 << 20)


@pytest.mark.parametrize("keeps", [True, False])
def test_pages_are_dropped_with_page_cache_drop(file: DiskFile, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = _calls(monkeypatch, os.POSIX_FADV_DONTNEED)
    _copied(FileSource(file, (Piece(300, 0, 10), Piece(100, 10, 5)), keeps_pages=keeps), 20)
    assert ranges == ([] if keeps else [(300, 10), (100, 5)])


def test_announcements_do_not_wait_and_the_latest_wins() -> None:
    import threading

    class Slow(FileSource):
        def announce(self) -> None:
            announced.append(self.pieces[0].nbytes)
            begun.set()
            assert go_on.wait(20)
            if self.pieces[0].nbytes == 3:
                done.set()

    announced: list[int] = []
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()
    ahead = ReadAhead()
    ahead.announce([Slow(None, (Piece(0, 0, 1),))])  # type: ignore[arg-type]
    assert begun.wait(20)
    for number in (2, 3):
        ahead.announce([Slow(None, (Piece(0, 0, number),))])  # type: ignore[arg-type]
    go_on.set()
    assert done.wait(20)
    assert announced == [1, 3]


def test_the_thread_ends_with_its_owner(file: DiskFile) -> None:
    import threading

    before = set(threading.enumerate())
    ahead = ReadAhead()
    ahead.announce([FileSource(file, (Piece(100, 0, 10),))])
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "moepass-read-ahead"
    del ahead
    thread.join(20)
    assert not thread.is_alive()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=8), st.randoms(use_true_random=False))
def test_pieces_in_file_order_bring_the_same_bytes(parts: list[tuple[int, int]], random: object) -> None:
    """Draw pieces with gaps between them, in the file and, in another order, in the slot."""
    order = list(range(len(parts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    in_slot: dict[int, int] = {}
    slot_offset = 0
    for index in order:
        in_slot[index] = slot_offset
        slot_offset += parts[index][1]
    pieces = []
    offset = 0
    for index, (gap, nbytes) in enumerate(parts):
        pieces.append(Piece(offset + gap, in_slot[index], nbytes))
        offset += gap + nbytes
    random.shuffle(pieces)  # type: ignore[attr-defined]

    def mapping(pieces: tuple[Piece, ...]) -> dict[int, int]:
        return {
            piece.slot_offset_bytes + step: piece.source_offset_bytes + step
            for piece in pieces
            for step in range(piece.nbytes)
        }

    ordered = in_file_order(pieces)
    assert mapping(ordered) == mapping(tuple(pieces))
    assert list(ordered) == sorted(ordered, key=lambda piece: piece.source_offset_bytes)
    assert sum(piece.nbytes for piece in ordered) == sum(piece.nbytes for piece in pieces)


EXPERTS = 3
_LAYOUTS: dict[str, Callable[[Tensors, str, list[int]], torch.Tensor]] = {
    "stacked": lambda t, kind, widths: t[f"{kind}.all"],
    "per expert": lambda t, kind, widths: torch.stack([t[f"{kind}.{e}.0"] for e in range(EXPERTS)]),
    "joined": lambda t, kind, widths: torch.cat(
        [torch.stack([t[f"{kind}.{e}.{p}"] for e in range(EXPERTS)]) for p in range(len(widths))], dim=1
    ),
    "joined twice": lambda t, kind, widths: torch.cat([_LAYOUTS["joined"](t, kind, widths), t[f"{kind}.all"]], dim=1),
    "viewed": lambda t, kind, widths: t[f"{kind}.all"].view(EXPERTS, -1, 1).clone(),
    # These are the tensors of two experts.
    "rows": lambda t, kind, widths: torch.cat([t[f"{kind}.all"][1:], t[f"{kind}.all"][:2]], dim=1),
    "same type": lambda t, kind, widths: _LAYOUTS["joined"](t, kind, widths).to(t[f"{kind}.all"].dtype),
}
_MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda bank: bank.transpose(1, 2),
    "cat along dimension 2": lambda bank: torch.cat([bank, bank], dim=2),
    "a conversion from torch.bfloat16 to torch.float32": lambda bank: bank.to(torch.float32),
    "mul": lambda bank: bank * 2,
    "flip": lambda bank: bank.flip(0),
}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_bank_in_a_slot_equals_the_result_of_its_recipes(tmp_path: Path, data: st.DataObject) -> None:
    draw = data.draw
    kinds = ["up", "down", "bias"][: draw(st.integers(1, 3))]
    hidden = draw(st.integers(1, 5))
    widths = {kind: draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)) for kind in kinds}
    numbers: Tensors = {}
    for kind in kinds:
        for position, width in enumerate(widths[kind]):
            for expert in range(EXPERTS):
                numbers[f"{kind}.{expert}.{position}"] = torch.randn(width, hidden).bfloat16()
        numbers[f"{kind}.all"] = torch.randn(EXPERTS, sum(widths[kind]), hidden).bfloat16()
    count = draw(st.integers(1, 3))
    file_of = {key: draw(st.integers(0, count - 1)) for key in numbers}
    paths = [tmp_path / f"{number}.safetensors" for number in range(count)]
    for number, path in enumerate(paths):
        path.unlink(missing_ok=True)
        save_file({key: value for key, value in numbers.items() if file_of[key] == number}, path)
    not_read = unread(CheckpointFiles(paths))
    chosen = {kind: draw(st.sampled_from(sorted(_LAYOUTS))) for kind in kinds}
    bank = {kind: _LAYOUTS[layout](not_read, kind, widths[kind]) for kind, layout in chosen.items()}
    expected = {kind: _LAYOUTS[layout](numbers, kind, widths[kind]) for kind, layout in chosen.items()}
    packer = DiskPacker(None, page_cache=draw(st.sampled_from(PAGE_CACHES)))
    packer.agree({"layer": bank})
    spec = packer.pack(0, "layer", bank).spec
    sources = packer.home.sources(spec, [])
    slot = torch.full((spec.format.slot_bytes,), 0xFF, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lanes, "SLICE_BYTES", draw(st.integers(1, 64)))
        CopyThread(Link()).submit(SlotCopy(sources, slot, "layer")).wait()
    read = read_range(sources, 0, spec.format.slot_bytes, CPU)
    for tensor, wanted in zip(spec.tensors, expected.values(), strict=True):
        assert torch.equal(tensor.view(slot), wanted)
        assert torch.equal(tensor.view(read), wanted)


@pytest.mark.parametrize("operation", _MADE)
def test_a_bank_that_must_be_written_needs_a_folder(operation: str, tmp_path: Path) -> None:
    save_file({"up.all": torch.randn(EXPERTS, 4, 6).bfloat16()}, tmp_path / "a.safetensors")
    tensor = _MADE[operation](unread(CheckpointFiles([tmp_path / "a.safetensors"]))["up.all"])
    with pytest.raises(
        moepass.InputError,
        match=rf"layer\.up is made by {operation}, and home='disk' needs .*folder with {tensor.nbytes} free b",
    ):
        DiskPacker(None).agree({"layer": {"up": tensor}})

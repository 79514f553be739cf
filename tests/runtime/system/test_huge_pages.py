"""Huge pages are requested only for the given memory, and only where complete huge pages fit."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moepass.runtime.system import huge_pages
from moepass.runtime.system.huge_pages import empty_in_huge_pages, use_huge_pages

SIZE = 1 << 16


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux only")
@given(address=st.integers(1, 8 * SIZE), nbytes=st.integers(0, 4 * SIZE))
def test_all_complete_huge_pages_are_requested(address: int, nbytes: int) -> None:
    calls: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huge_pages, "_huge_page_bytes", lambda: SIZE)
        patch.setattr(huge_pages, "advise", lambda *advice: calls.append(advice))
        use_huge_pages(address, nbytes)
    pages = [page for page in range(0, 16 * SIZE, SIZE) if address <= page and page + SIZE <= address + nbytes]
    expected = [(pages[0], len(pages) * SIZE, mmap.MADV_HUGEPAGE)] if pages else []
    assert calls == expected


def test_nothing_is_requested_on_systems_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(huge_pages, "_huge_page_bytes", lambda: None)
    monkeypatch.setattr(huge_pages, "advise", lambda *advice: calls.append(advice))
    use_huge_pages(SIZE, 4 * SIZE)
    assert not calls


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (1 << 11, 1 << 10)])
def test_tensors_are_like_those_of_torch(shape: tuple[int, ...]) -> None:
    memory = empty_in_huge_pages(shape, torch.float32)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == (torch.Size(shape), torch.float32, True)
    assert memory.fill_(3).sum() == 3 * memory.numel()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux says of a process's memory")
def test_the_request_shows_in_the_memory_flags() -> None:
    """The request shows as `hg` in the memory's flags, even if the system has no huge pages left."""
    size = huge_pages._huge_page_bytes()
    if size is None:
        pytest.skip("this kernel comes without huge pages")
    memory = empty_in_huge_pages((8 * size,), torch.uint8)
    inside = -(-memory.data_ptr() // size) * size
    flags: list[str] = []
    is_it = False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(address, 16) for address in first.split("-"))
                is_it = begin <= inside < end
            elif is_it and first == "VmFlags:":
                flags = line.split()[1:]
    assert "hg" in flags

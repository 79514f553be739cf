"""Memory in huge pages: only memory that is asked for, and only where whole huge pages fit."""

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
def test_whole_huge_pages_inside_and_all_of_them(address: int, nbytes: int) -> None:
    told: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huge_pages, "_huge_page_bytes", lambda: SIZE)
        patch.setattr(huge_pages, "advise", lambda *advice: told.append(advice))
        use_huge_pages(address, nbytes)
    whole = [page for page in range(0, 16 * SIZE, SIZE) if address <= page and page + SIZE <= address + nbytes]
    expected = [(whole[0], len(whole) * SIZE, mmap.MADV_HUGEPAGE)] if whole else []
    assert told == expected


def test_systems_without_huge_pages_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, ...]] = []
    monkeypatch.setattr(huge_pages, "_huge_page_bytes", lambda: None)
    monkeypatch.setattr(huge_pages, "advise", lambda *advice: told.append(advice))
    use_huge_pages(SIZE, 4 * SIZE)
    assert not told


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (1 << 11, 1 << 10)])
def test_values_are_as_those_of_torch(shape: tuple[int, ...]) -> None:
    found = empty_in_huge_pages(shape, torch.float32)
    assert (found.shape, found.dtype, found.is_contiguous()) == (torch.Size(shape), torch.float32, True)
    assert found.fill_(3).sum() == 3 * found.numel()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux says of a process's memory")
def test_the_system_was_asked() -> None:
    """Whether it has any to give is not up to us; that it was asked shows as `hg` in the memory's flags."""
    size = huge_pages._huge_page_bytes()
    if size is None:
        pytest.skip("this kernel comes without huge pages")
    found = empty_in_huge_pages((8 * size,), torch.uint8)
    inside = -(-found.data_ptr() // size) * size
    flags: list[str] = []
    is_it = False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                is_it = begin <= inside < end
            elif is_it and first == "VmFlags:":
                flags = line.split()[1:]
    assert "hg" in flags

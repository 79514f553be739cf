"""The pages of segments that lie in a slot; they stay mapped while pages of another bank lie there.

To map pages anew takes a third of the time of copying them, one entry of the page tables after the other. So what has
to leave a slot moves aside, page tables and all, and moves in again when its bank comes back. Pages that somebody wrote
to are never kept: the next turn of their bank maps them anew.

What is remembered is forgotten before pages move and added after they did. So whatever an exception leaves half done is
at worst not kept.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from moepass.runtime.system.huge_pages import use_huge_pages
from moepass.runtime.system.page_mapping import TABLE_BYTES, has_written_pages, move_pages, private_memory
from moepass.runtime.system.shared_memory import SharedMemoryError, SharedSegment


class KeptPages:
    """Bytes [offset, offset + nbytes) of a segment, whole pages, that belong at byte `begin` of any slot."""

    def __init__(self, segment: SharedSegment, offset: int, nbytes: int, begin: int) -> None:
        self.begin, self.end = begin, begin + nbytes
        self._segment, self._offset, self._nbytes = segment, offset, nbytes
        # Where they are kept, and whether they are there now.
        self._aside: torch.Tensor | None = None
        self._are_aside = False

    def move_in(self, slot: torch.Tensor) -> None:
        """Let `slot` have them. Raises SharedMemoryError where they cannot be mapped."""
        address = slot.data_ptr() + self.begin
        if self._are_aside:
            self._are_aside = False
            try:
                if move_pages(self._aside_address(), self._nbytes, address):
                    return
            except OSError as error:
                _lost.append(slot)
                raise SharedMemoryError(f"{self._nbytes} bytes of a slot are lost: {error.strerror}") from error
        self._segment.lay(self._offset, self._nbytes, address)

    def move_out(self, slot: torch.Tensor) -> None:
        """Keep them, if they are in `slot` unwritten and not kept already; something else comes to their place."""
        address = slot.data_ptr() + self.begin
        if self._are_aside or has_written_pages(address, self._nbytes) is not False:
            return
        try:
            self._are_aside = move_pages(address, self._nbytes, self._aside_address())
        except OSError:  # no addresses to keep them at: they are mapped anew
            if self._aside is not None:
                _lost.append(self._aside)

    def _aside_address(self) -> int:
        # As far from the beginning of a page table as in a slot.
        shift = self.begin % TABLE_BYTES
        if self._aside is None:
            self._aside = private_memory(shift + self._nbytes)
        return self._aside.data_ptr() + shift


# Memory into which others may have mapped something, so that it must not be unmapped.
_lost: list[torch.Tensor] = []

# The pages that lie in each slot.
_laid = WeakIdKeyDictionary()


def slot_memory(nbytes: int) -> torch.Tensor:
    """Memory of a slot on a CPU, flat uint8, into which pages can be laid."""
    memory = private_memory(nbytes)
    use_huge_pages(memory.data_ptr(), nbytes)
    _laid[memory] = []
    return memory


def lay_in_slot(pages: KeptPages, slot: torch.Tensor) -> None:
    """Let `slot` have `pages`.

    Raises KeyError for memory that is not of `slot_memory`, and SharedMemoryError where the pages cannot be mapped.
    """
    laid: list[KeptPages] = _laid[slot]
    for other in [other for other in laid if other.begin < pages.end and pages.begin < other.end]:
        laid.remove(other)
        other.move_out(slot)
    pages.move_in(slot)
    laid.append(pages)

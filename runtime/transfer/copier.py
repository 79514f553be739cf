"""The device-specific part of a ring: how bytes are copied into a slot beside the computation, and how to wait for
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from moepass.runtime.transfer.learned_order import Fetch

# Writes the bytes of the slot from the bytes of the link; both flat uint8.
Decoder = Callable[[torch.Tensor, torch.Tensor], None]
# Seconds of one wait for a bank; on CUDA known only once it is over.
Wait = Callable[[], float]


@dataclasses.dataclass
class RingStatistics:
    """What a ring did since it was made. `waited_seconds` is the exposed time: how long the computation waited for
    banks, on a CPU by the host's clock, on CUDA by events of the compute stream.

    `copied_bytes` went into slots or the encoded buffer; `link_bytes` of them came over the link, the others from this
    rank's own shards. `decodes` counts the banks that were decoded.
    With home `hybrid`, `staged_bytes` of what runs have used came from staging buffers, `unstaged_bytes` from host
    memory.

    Slots that a run has done with are filled for the next run while this one ends: `ahead_used` of these copies were
    what the next run asked for, `ahead_wasted` were not.
    """

    copies: int = 0
    copied_bytes: int = 0
    link_bytes: int = 0
    decodes: int = 0
    waited_seconds: float = 0.0
    ahead_used: int = 0
    ahead_wasted: int = 0
    staged_bytes: int = 0
    unstaged_bytes: int = 0


class Copier:
    """Fills slots in the order of `submit`, later than all copies before.

    `filled` is what `submit` gave; an event is what `event` gave, or None for "at once".
    """

    def submit(self, fetch: Fetch, target: torch.Tensor, after: object) -> object:
        """Bring `fetch` into `target`, flat uint8, once the event `after` has happened; gives `filled`.

        The target is a slot, or the encoded buffer, from which `decode` goes on.
        """
        raise NotImplementedError

    def decode(self, copied: object, decoder: Decoder, link: torch.Tensor, slot: torch.Tensor) -> object:
        """Fill `slot` by `decoder` from `link`, once `copied`, the last copy that was submitted, has filled that. Gives
        `filled`, which replaces `copied` from now on.
        """
        raise NotImplementedError

    def wait(self, filled: object, statistics: RingStatistics) -> Wait:
        """Make all work issued from now on wait for `filled`. Raises CopyError if the copy failed."""
        raise NotImplementedError

    def event(self) -> object:
        """An event that fires when all work issued so far is done."""
        raise NotImplementedError

    def abandon(self, filled: object) -> None:
        """Let go of a copy that no run will wait for."""
        raise NotImplementedError

    def quiesce(self) -> None:
        """Return once all copies have ended, and no work that was issued so far, on any stream, reads a slot."""
        raise NotImplementedError

    def close(self) -> None:
        """The ring goes: return once nobody uses its memory who does not keep it. May be called in any thread."""

    def settle(self, statistics: RingStatistics) -> None:
        """Add the waits that have ended since the last call to `statistics`."""

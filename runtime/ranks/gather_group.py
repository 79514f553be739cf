"""Ranks that gather banks together, one gather after the other, over gloo connections.

"Transport `collective`" in `runtime/homes/README.md` says what ranks compare, and what an error does. A gather uses
point-to-point sends. gloo's allgather takes equal sizes only, and assembles them in extra memory before copying them
out. Measured on two ranks and 25 MB over loopback: 13 ms against 63 ms.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from moepass.models.errors import InputError
from moepass.passes.ir.plan import NO_GATHER_SIGNATURE, GatherSignature
from moepass.runtime.ranks.agree import Topic, agree_on_run
from moepass.runtime.ranks.connections import Connections
from moepass.runtime.ranks.rendezvous import Rendezvous

# A gather: the index of its bank, the first byte, and the byte after the last one.
Request = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class _Described:
    """A request whose text in errors is `text`."""

    request: Request
    text: str

    def __str__(self) -> str:
        return self.text


class GatherGroup(Connections):
    """This rank's connections for gathers; all ranks create them together.

    Only one thread may call `ask` and `gather`; any thread may call `check` and `fail`. `describe` returns the name of
    a request, in errors. Raises PeerError as `Connections`, and InputError if this build of torch has no gloo.
    """

    def __init__(self, rendezvous: Rendezvous, describe: Callable[[Request], str]) -> None:
        if not torch.distributed.is_gloo_available():
            text = "transport='collective' needs gloo, which this build of torch lacks; use transport='pull'"
            raise InputError(text, name="transport", value="collective", expected="pull")
        self._describe = describe
        self._timeout_s = rendezvous.timeout_s
        super().__init__(rendezvous, "gathers", "transport 'collective'")

    def ask(self, request: Request, wants: bool, plan: GatherSignature = NO_GATHER_SIGNATURE) -> dict[int, bool]:
        """Wait until all ranks ask for the same gather; return for each other rank whether it wants the bytes.

        `plan` is the order of this run's gathers; ranks without one are not compared. Raises DisagreementError if ranks
        ask for different gathers, or in different orders, and PeerError if one does not respond or has ended.
        """
        self.check()
        bank = self._describe(request)
        late = (
            f"did not start to gather {bank} within {self._timeout_s:g} s. With transport 'collective' all ranks must "
            "run the same layers, equally often: call moepass.gather_only_step(model) on a rank without work for a "
            "step. If some ranks compile longer than others, set a longer timeout_s"
        )
        topics = [
            Topic(
                "what they gather",
                _Described(request, bank),
                "with transport 'collective' all ranks must run the same layers in the same order, and a rank without "
                "work must call moepass.gather_only_step(model)",
            ),
            Topic(
                f"the plan by which they gather {bank}",
                None if plan == NO_GATHER_SIGNATURE else plan,
                "with transport 'collective' all ranks must compile the same model, with as many slots and the same "
                "graph breaks, so that they gather in one order",
            ),
            Topic("wants the bytes", wants, is_vote=True),
        ]
        votes = agree_on_run(self, topics, time.monotonic() + self._timeout_s, late, f"{bank} was gathered")
        return {rank: bool(votes[rank][0]) for rank in self.others}

    def gather(
        self,
        request: Request,
        send: Mapping[int, Sequence[torch.Tensor]],
        receive: Mapping[int, Sequence[torch.Tensor]],
        overlapped: Callable[[], None] = lambda: None,
    ) -> None:
        """Send contiguous tensors to other ranks, and receive tensors in place, in the order in which they are sent.

        `overlapped` is called while bytes are on their way. Once this has returned or raised, nothing is written to
        `receive` any more. Raises PeerError as `ask`.
        """
        bank = self._describe(request)
        late = f"did not bring its part of {bank} within {self._timeout_s:g} s (transport 'collective')"
        deadline = time.monotonic() + self._timeout_s
        self.exchange(receive, send, deadline, late, f"{bank} was gathered", overlapped)

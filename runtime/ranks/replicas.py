"""Whether all ranks run a graph on the same tokens, where a plan relies on it.

Results of masked experts may be added up over ranks only if every rank has the same tokens, experts and weights. The
ranks compared how these are computed when they compiled. What they are computed from, parameters, buffers and inputs,
they compare here, by checksums: in the first run of a graph, in the next one after parameters changed on any rank, and
in every run while any rank has `debug` on.

A rank cannot see changes on another rank. So in every run each rank sends the number of the comparison that covers its
parameters. If the numbers differ, all ranks compare again. All ranks run such a graph equally often, since all have the
same tokens.

How a rank notices that a parameter changed:

memory    where it lies
version   torch counts writes in place; not those through `.data` or numpy, by `dist.recv` or `dist.broadcast`, nor any
          to an inference tensor
sample    of a parameter on a CPU: a few hundred bytes. Weights that were loaded or received show, a few numbers of a
          large parameter may not. On other devices, for which the host would have to wait, there is none
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.passes.parallel.proposals import explain_difference
from moepass.runtime.ranks.agreement import NEVER_COMPARED, agreement_of
from moepass.runtime.ranks.checksum import checksum
from moepass.runtime.ranks.of_group import OfGroup
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.system.tensor_memory import memory_of, sampled_bytes
from moepass.runtime.torch_private import store_of

_COMPARISON = (
    "all ranks had come to a run whose inputs are compared, since parameters changed on some rank or it has debug on: "
    "a rank that is missing failed since then, see its output"
)


class _State(NamedTuple):
    """The experts and other parameters of a run, and what tells them from others, and whether they were changed."""

    tensors: tuple[torch.Tensor, ...]
    key: object
    contents: object


class _Compared(NamedTuple):
    """The result of the meeting `number` for parameters with these `contents`: what differed, or None."""

    number: int
    difference: str | None
    contents: object
    storages: tuple[StorageWeakRef, ...]

    @property
    def is_alive(self) -> bool:
        return not any(storage.expired() for storage in self.storages)


class Comparisons:
    """The last comparison for each graph and its parameters, of the ranks of one group, as one of them knows them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._last: dict[object, _Compared] = {}

    def find(self, state: _State) -> _Compared | None:
        """The comparison of these parameters, unless one of them changed since."""
        found = self._last.get(state.key)
        return found if found is not None and found.is_alive and found.contents == state.contents else None

    def remember(self, state: _State, number: int, difference: str | None) -> None:
        storages = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in state.tensors)
        living = {key: compared for key, compared in self._last.items() if compared.is_alive}
        self._last = {**living, state.key: _Compared(number, difference, state.contents, storages)}


class ReplicaCheck:
    """Compares the inputs of one graph that its replicated tokens are computed from.

    A rank that captures its model again, alone, knows what ranks found before: comparisons belong to the group.
    """

    def __init__(
        self,
        group: Callable[[], ProcessGroup],
        inputs: Mapping[int, str],
        signature: str,
        blocks: tuple[str, ...],
        timeout_s: float,
        debug: bool,
        alike: Sequence[Sequence[int]] = (),
    ) -> None:
        """`inputs` are their places among the graph's inputs, with words for each; `signature` tells graphs apart that
        compute differently. `blocks` are those that the graph runs without exchanges, in words that all ranks have in
        common. `alike` are the ranks that must have the same as each other; empty where all must.
        """
        self._group = group
        self._inputs = dict(sorted(inputs.items()))
        self._signature = signature
        self._blocks = blocks
        self._timeout_s = timeout_s
        self._debug = debug
        self._alike = alike

    def difference(self, arguments: Sequence[Any], experts: Sequence[torch.Tensor]) -> str | None:
        """The difference between ranks, in the same words on all; None if there is none.

        `experts` are this rank's tensors of the banks. Waits for the other ranks to come to the same run, and for their
        checksums where these are needed. Raises PeerError where ranks are about to run different blocks, are gone, or
        do not come within the timeout.
        """
        group = self._group()
        comparisons = comparisons_of(group)
        state = self._state(arguments, experts)
        with comparisons.lock:
            known = comparisons.find(state)
            is_enough = known is not None and not (self._debug and known.difference is None)
            compared_in = known.number if known is not None and is_enough else NEVER_COMPARED
            # The meeting is the same on all ranks, and so is what they found in it.
            if agreement_of(group).compare(self._blocks, self._timeout_s, compared_in) and known is not None:
                return known.difference
            number, difference = self._compare(group, arguments)
            comparisons.remember(state, number, difference)
            return difference

    def _state(self, arguments: Sequence[Any], experts: Sequence[torch.Tensor]) -> _State:
        values = (arguments[place] for place in self._inputs)
        parameters = [value for value in values if isinstance(value, torch.nn.Parameter)]
        # Writes into experts are not checked here: see MutationGuard.
        tensors = (*experts, *parameters)
        key = self._signature, tuple(self._inputs.items()), *map(memory_of, tensors)
        versions = [0 if parameter.is_inference() else parameter._version for parameter in parameters]
        samples = [sampled_bytes(parameter) for parameter in parameters if parameter.device.type == "cpu"]
        return _State(tensors, key, (versions, hash(b"".join(samples))))

    def _compare(self, group: ProcessGroup, arguments: Sequence[Any]) -> tuple[int, str | None]:
        """The number of the meeting, and what differs."""
        own = [self._signature] + [f"{words}: {describe(arguments[place])}" for place, words in self._inputs.items()]
        rendezvous = Rendezvous(store_of(group), group.rank(), group.size(), self._timeout_s, _COMPARISON)
        found = dict(rendezvous.exchange("list of checksums", own, list[str]))
        of_ranks = ({rank: found[rank] for rank in ranks} for ranks in self._alike or (sorted(found),))
        differences = (explain_difference(texts, "the inputs that it is computed from") for texts in of_ranks)
        return rendezvous.number, next(filter(None, differences), None)


# One Comparisons per process group.
comparisons_of = OfGroup(lambda group: Comparisons())


def describe(value: Any) -> str:
    """A text that is equal for equal inputs: type, shape and checksum of a tensor, or the number itself."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)}, checksum {checksum(value):016x}"

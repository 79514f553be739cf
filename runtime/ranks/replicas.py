"""A check that all ranks run a graph on the same tokens, for plans that rely on it.

Results of masked experts may be added up over ranks only if every rank has the same tokens, experts and weights. The
ranks compared the computation of these when they compiled. Here they compare its inputs (parameters, buffers and other
inputs) by checksums: in the first run of a graph, in the next one after parameters changed on any rank, and in every
run while any rank has `debug` on.

A rank cannot see changes on another rank. So in every run each rank sends the number of the comparison that covers its
parameters. If the numbers differ, all ranks compare again. All ranks run such a graph equally often, since all have the
same tokens.

A rank notices a changed parameter by:

memory    its address
version   torch's count of writes in place, which misses those through `.data` or numpy, by `dist.recv` or
          `dist.broadcast`, and to an inference tensor
sample    of a parameter on a CPU: a few hundred bytes. It shows weights that were loaded or received, but may miss a
          change of a few numbers. Other devices have no sample, because the host would have to wait
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


class _RunInputs(NamedTuple):
    """The experts and other parameters of a run, the key that identifies them, and a summary that shows changes."""

    tensors: tuple[torch.Tensor, ...]
    key: object
    contents: object


class _Compared(NamedTuple):
    """The result of one comparison: the difference between the ranks, or None if there is none.

    Attributes:
        number: the number of the meeting in which the ranks compared.
        contents: the contents of this rank's parameters.
    """

    number: int
    difference: str | None
    contents: object
    storages: tuple[StorageWeakRef, ...]

    @property
    def is_alive(self) -> bool:
        return not any(storage.expired() for storage in self.storages)


class Comparisons:
    """The ranks' last comparison for each graph and its parameters, in one group."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._last: dict[object, _Compared] = {}

    def find(self, state: _RunInputs) -> _Compared | None:
        """Return the comparison of these parameters; None if there was none, or one of them changed since."""
        last = self._last.get(state.key)
        return last if last is not None and last.is_alive and last.contents == state.contents else None

    def remember(self, state: _RunInputs, number: int, difference: str | None) -> None:
        """Record the result of a comparison, and remove results for freed parameters."""
        storages = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in state.tensors)
        living = {key: compared for key, compared in self._last.items() if compared.is_alive}
        self._last = {**living, state.key: _Compared(number, difference, state.contents, storages)}


class ReplicaCheck:
    """A comparison between ranks of the inputs that one graph computes its replicated tokens from.

    Comparisons belong to the group, so a rank that captures its model again uses the earlier ones.

    Args:
        group: the ranks.
        inputs: for each input to compare, its position among the graph's inputs and its description.
        signature: a digest of the computation, different for different graphs.
        blocks: descriptions of the blocks that the graph runs without exchanges, equal on all ranks.
        timeout_s: seconds that ranks wait for each other.
        debug: whether to compare in every run.
        alike: groups of ranks that must have the same inputs; empty if all ranks must.
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
        self._group = group
        self._inputs = dict(sorted(inputs.items()))
        self._signature = signature
        self._blocks = blocks
        self._timeout_s = timeout_s
        self._debug = debug
        self._alike = alike

    def difference(self, arguments: Sequence[Any], experts: Sequence[torch.Tensor]) -> str | None:
        """Return the difference between ranks, in the same words on all, or None.

        Waits for the other ranks to come to the same run, and for their checksums if these are needed.

        Args:
            arguments: the inputs of the graph.
            experts: this rank's tensors of the banks.

        Raises:
            PeerError: ranks are about to run different blocks, have ended, or do not respond within the timeout.
        """
        group = self._group()
        comparisons = comparisons_of(group)
        state = self._state(arguments, experts)
        with comparisons.lock:
            last = comparisons.find(state)
            is_enough = last is not None and not (self._debug and last.difference is None)
            compared_in = last.number if last is not None and is_enough else NEVER_COMPARED
            # All ranks had this meeting, and got the same result in it.
            if agreement_of(group).compare(self._blocks, self._timeout_s, compared_in) and last is not None:
                return last.difference
            number, difference = self._compare(group, arguments)
            comparisons.remember(state, number, difference)
            return difference

    def _state(self, arguments: Sequence[Any], experts: Sequence[torch.Tensor]) -> _RunInputs:
        values = (arguments[index] for index in self._inputs)
        parameters = [value for value in values if isinstance(value, torch.nn.Parameter)]
        # Writes to experts are checked by MutationGuard.
        tensors = (*experts, *parameters)
        key = self._signature, tuple(self._inputs.items()), *map(memory_of, tensors)
        versions = [0 if parameter.is_inference() else parameter._version for parameter in parameters]
        samples = [sampled_bytes(parameter) for parameter in parameters if parameter.device.type == "cpu"]
        return _RunInputs(tensors, key, (versions, hash(b"".join(samples))))

    def _compare(self, group: ProcessGroup, arguments: Sequence[Any]) -> tuple[int, str | None]:
        """Return the number of the meeting, and the difference or None."""
        texts = [self._signature] + [f"{words}: {describe(arguments[index])}" for index, words in self._inputs.items()]
        rendezvous = Rendezvous(store_of(group), group.rank(), group.size(), self._timeout_s, _COMPARISON)
        by_rank = dict(rendezvous.exchange("list of checksums", texts, list[str]))
        groups = ({rank: by_rank[rank] for rank in ranks} for ranks in self._alike or (sorted(by_rank),))
        differences = (explain_difference(group, "the inputs that it is computed from") for group in groups)
        return rendezvous.number, next(filter(None, differences), None)


# One Comparisons per process group.
comparisons_of = OfGroup(lambda group: Comparisons())


def describe(value: Any) -> str:
    """Return a text that is equal for equal inputs: dtype, shape and checksum of a tensor, or the number itself."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)}, checksum {checksum(value):016x}"

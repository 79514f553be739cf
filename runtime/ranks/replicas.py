"""Whether all ranks run a graph on the same tokens, where a plan relies on it.

Results of masked experts may be added up over ranks only if every rank has the same tokens, experts and weights. The
ranks compared how these are computed when they compiled. What they are computed from, parameters, buffers and inputs,
they compare here: by checksums, in the first run of a graph, and in every run under `debug`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.passes.parallel.proposals import explain_difference
from moepass.runtime.ranks.checksum import checksum
from moepass.runtime.ranks.decisions import MEETING
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.system.forking import renew_after_fork
from moepass.runtime.system.tensor_memory import memory_of

logger = logging.getLogger("moepass")


class _State(NamedTuple):
    """The experts and other parameters of a run, and what tells whether they are those of another, unchanged."""

    tensors: tuple[torch.Tensor, ...]
    key: object


class ReplicaCheck:
    """Compares the inputs of a graph that its replicated tokens are computed from.

    `inputs` are their places among the graph's inputs, with words for each; `signature` tells graphs apart that compute
    differently. Graphs with the same of both share one (`replica_check_of`): a rank that captures its model again,
    alone, knows what ranks found before.
    """

    def __init__(
        self,
        group: Callable[[], ProcessGroup],
        inputs: Mapping[int, str],
        signature: str,
        timeout_s: float,
        debug: bool,
    ) -> None:
        self._group = group
        self._inputs = dict(sorted(inputs.items()))
        self._signature = signature
        self._timeout_s = timeout_s
        self._debug = debug
        # By experts and other parameters, as they were then: what kept ranks from having the same tokens, or None.
        self._found: dict[object, tuple[str | None, tuple[StorageWeakRef, ...]]] = {}
        self._lock = threading.Lock()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def difference(self, arguments: Sequence[Any], experts: Sequence[torch.Tensor]) -> str | None:
        """What differs between ranks, in the same words on all; None where nothing does.

        `experts` are this rank's tensors of the banks. Waits for the other ranks in the first run with these and with
        the parameters among `arguments`, in the first after one of the latter was written in place, and under `debug`
        in every one until something differed. Raises PeerError where ranks do not come within the timeout.
        """
        state = self._state(arguments, experts)
        with self._lock:
            known = self._found.get(state.key)
            if known is not None and any(storage.expired() for storage in known[1]):
                known = None
            if known is not None and (known[0] is not None or not self._debug):
                return known[0]
            found = self._compare(arguments)
            self._remember(state, found)
            return found

    def moved(self, arguments: Sequence[Any], experts: Sequence[torch.Tensor]) -> None:
        """These, in which nothing differed, lie elsewhere from now on."""
        with self._lock:
            self._remember(self._state(arguments, experts), None)

    def _state(self, arguments: Sequence[Any], experts: Sequence[torch.Tensor]) -> _State:
        values = (arguments[place] for place in self._inputs)
        parameters = [value for value in values if isinstance(value, torch.nn.Parameter)]
        # What is written into experts is not looked for here: see MutationGuard.
        written = [0 if parameter.is_inference() else parameter._version for parameter in parameters]
        tensors = (*experts, *parameters)
        return _State(tensors, (*map(memory_of, tensors), *written))

    def _remember(self, state: _State, found: str | None) -> None:
        storages = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in state.tensors)
        living = {key: value for key, value in self._found.items() if not any(item.expired() for item in value[1])}
        self._found = {**living, state.key: (found, storages)}

    def _compare(self, arguments: Sequence[Any]) -> str | None:
        group = self._group()
        own = [self._signature] + [f"{words}: {describe(arguments[place])}" for place, words in self._inputs.items()]
        rendezvous = Rendezvous(
            c10d._get_process_group_store(group), group.rank(), group.size(), self._timeout_s, MEETING
        )
        rendezvous.publish("checksums of inputs", own)
        found = dict(rendezvous.read_all("checksums of inputs", list[str], check=lambda: None))
        found[group.rank()] = own
        return explain_difference([found[rank] for rank in sorted(found)], "the inputs that it is computed from")


_checks: weakref.WeakKeyDictionary[ProcessGroup, dict[object, ReplicaCheck]] = weakref.WeakKeyDictionary()
_checks_lock = threading.Lock()


def replica_check_of(
    group: Callable[[], ProcessGroup], inputs: Mapping[int, str], signature: str, timeout_s: float, debug: bool
) -> ReplicaCheck:
    """The check of all graphs that give the same of these; it lives as long as the group."""
    key = signature, tuple(sorted(inputs.items())), timeout_s, debug
    with _checks_lock:
        known = _checks.setdefault(group(), {})
        if key not in known:
            known[key] = ReplicaCheck(group, inputs, signature, timeout_s, debug)
        return known[key]


def describe(value: Any) -> str:
    """What is equal for equal inputs of a graph: type, shape and checksum of a tensor, or the number itself."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)}, checksum {checksum(value):016x}"

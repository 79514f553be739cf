"""A check that all ranks run a graph on the same tokens, for plans that rely on it.

When the ranks compiled, they compared how tokens are computed. Here they compare its inputs (parameters, buffers and
arguments) by checksums. "Equal tokens" in README.md says in which runs, and how a rank notices a changed parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from moepass.passes.parallel.proposals import explain_difference
from moepass.runtime.ranks.agreement import NEVER_COMPARED, agreement_of
from moepass.runtime.ranks.of_group import of_group
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.system.tensor_memory import MemoryTable, memory_of, sampled_bytes
from moepass.runtime.torch_private import store_of

_COMPARISON = (
    "all ranks had come to a run whose inputs are compared, since parameters changed on some rank or it has debug on: "
    "a rank that is missing failed since then, see its output"
)
# Words of 8 bytes in a chunk. On a CPU two chunks fit into the cache; on a device a chunk hides the launch overhead.
_CHUNK_WORDS_CPU = 2**16
_CHUNK_WORDS_DEVICE = 2**22
_ALL_BITS = 2**64 - 1
# The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), and its step.
_STEP = 0x9E3779B97F4A7C15
_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class _RunInputs(NamedTuple):
    """The experts and other parameters of a run, the key that identifies them, and a summary that shows changes."""

    tensors: tuple[torch.Tensor, ...]
    key: Hashable
    contents: object


class _Compared(NamedTuple):
    """The result of one comparison, in meeting `number`: the difference between the ranks, or None."""

    number: int
    difference: str | None
    contents: object


class Comparisons:
    """The ranks' last comparison for each graph and its parameters, in one group."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last: MemoryTable[_Compared] = MemoryTable()


class ReplicaCheck:
    """A comparison between ranks of the inputs that one graph computes its replicated tokens from.

    Comparisons belong to the group, so a rank that captures its model again uses the earlier comparisons.

    `inputs` has the descriptions of the inputs to compare, by their positions among the graph's inputs. `signature` is
    a digest of the computation, different for different graphs, and `blocks` are descriptions of the blocks that the
    graph runs without exchanges, equal on all ranks. With `debug`, ranks compare in every run.
    """

    def __init__(
        self,
        group: Callable[[], ProcessGroup],
        inputs: Mapping[int, str],
        signature: str,
        blocks: tuple[str, ...],
        timeout_s: float,
        debug: bool,
    ) -> None:
        self._group = group
        self._inputs = dict(sorted(inputs.items()))
        self._signature = signature
        self._blocks = blocks
        self._timeout_s = timeout_s
        self._debug = debug

    def difference(self, arguments: Sequence[Any], experts: Sequence[torch.Tensor]) -> str | None:
        """Return the difference between ranks, in the same words on all, or None.

        Waits for the other ranks to come to the same run, and for their checksums if these are needed. `arguments` are
        the inputs of the graph, `experts` this rank's tensors of the banks. Raises PeerError if ranks are about to run
        different blocks, have ended, or do not respond within the timeout.
        """
        group = self._group()
        comparisons = comparisons_of(group)
        state = self._state(arguments, experts)
        with comparisons.lock:
            last = comparisons.last.find(state.key)
            last = last if last is not None and last.contents == state.contents else None
            is_enough = last is not None and not (self._debug and last.difference is None)
            compared_in = last.number if last is not None and is_enough else NEVER_COMPARED
            # All ranks had this meeting, and got the same result in it.
            if agreement_of(group).compare(self._blocks, self._timeout_s, compared_in) and last is not None:
                return last.difference
            number, difference = self._compare(group, arguments)
            comparisons.last.add(state.key, state.tensors, _Compared(number, difference, state.contents))
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
        of_ranks = [of_rank for _, of_rank in rendezvous.exchange("list of checksums", texts, list[str])]
        return rendezvous.number, explain_difference(of_ranks, "the inputs that it is computed from")


# One Comparisons per process group.
comparisons_of = of_group(lambda group: Comparisons())


def describe(value: Any) -> str:
    """Return a text that is equal for equal inputs: dtype, shape and checksum of a tensor, or the number itself."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)}, checksum {checksum(value):016x}"


def checksum(tensor: torch.Tensor) -> int:
    """Return 64 bits computed from all bits of `tensor`, in the order of its elements, on its device.

    The checksum is a sum modulo 2^64 over all words of 8 bytes. Each word is combined with its position by XOR, and
    `_mix` is applied to the result. (In a plain weighted sum two flipped signs could cancel out.) A difference in a
    single word always changes the checksum, other differences almost certainly. It is not secure against chosen inputs.

    The computation needs temporary memory for three chunks of `_CHUNK_WORDS_CPU` or `_CHUNK_WORDS_DEVICE` words, and
    for a copy of the tensor if the tensor is not contiguous or not aligned to 8 bytes.
    """
    octets = _octets(tensor)
    whole_bytes = octets.numel() // 8 * 8
    # A view may begin at an address that is not a multiple of 8.
    aligned = octets[:whole_bytes] if octets.storage_offset() % 8 == 0 else octets[:whole_bytes].clone()
    words = aligned.view(torch.int64)
    length = _CHUNK_WORDS_CPU if words.device.type == "cpu" else _CHUNK_WORDS_DEVICE
    steps = torch.arange(min(length, words.numel()), device=words.device, dtype=torch.int64).mul_(_signed(_STEP))
    mixed, shifted = torch.empty_like(steps), torch.empty_like(steps)
    total = torch.zeros((), device=words.device, dtype=torch.int64)
    for start in range(0, words.numel(), length):
        chunk = words[start : start + length]
        result = mixed[: chunk.numel()]
        torch.add(steps[: chunk.numel()], _signed((start + 1) * _STEP), out=result)
        result.bitwise_xor_(chunk)
        _mix(result, shifted[: chunk.numel()])
        total += result.sum()
    tail = int.from_bytes(bytes(octets[whole_bytes:].tolist()), "little")
    return (int(total) + _mixed(tail ^ _mixed(octets.numel()))) & _ALL_BITS


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `tensor`, in the order of its elements."""
    # A conjugate or negative may be a view that stores other bits.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return flat.view(torch.uint8) if flat.numel() else flat.new_zeros(0, dtype=torch.uint8)


def _mix(words: torch.Tensor, shifted: torch.Tensor) -> None:
    """Replace each of `words` (int64) one to one, so that every bit depends on all; `shifted` is scratch memory."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        # A shift of a signed number inserts copies of its sign, which are masked out.
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_(_ALL_BITS >> shift))
        if factor is not None:
            words.mul_(_signed(factor))


def _mixed(word: int) -> int:
    """Return the result of `_mix` for one number below 2^64."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        word = (word ^ (word >> shift)) * factor & _ALL_BITS
    return word


def _signed(word: int) -> int:
    """Return the signed 64-bit number with the same bits."""
    word &= _ALL_BITS
    return word - 2**64 if word >> 63 else word

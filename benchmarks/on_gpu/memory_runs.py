"""Part `memory`: the longest sequence that fits, with and without hybrid prefill, with and without keys and values.

Experts are streamed from host memory. The device's memory is limited, so that the longest sequence is short enough for
attention, whose time grows with its square.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

import moepass
from benchmarks.on_gpu.models import build_model, held_bytes, token_ids
from benchmarks.on_gpu.tables import ResultTable
from benchmarks.on_gpu.target import Deadline, Failures, Target, conditions, fits

_SLOTS = 2
# The relative precision at which the search ends.
_RESOLUTION = 1 / 16
_GRANULE = 64


@dataclasses.dataclass(frozen=True)
class LongestSequence:
    """The longest sequence: `tokens` fit, `beyond` do not (None if all did). `reason` is why it was not measured."""

    chunk_tokens: int | None
    keeps_kv: bool
    tokens: int = 0
    beyond: int | None = None
    reason: str = ""


def longest(
    is_enough: Callable[[int], bool], start: int, most: int, is_over: Callable[[], bool] = lambda: False
) -> tuple[int, int | None]:
    """Return the most tokens, up to `most`, for which `is_enough` is true, and the fewest for which it is false.

    The search doubles from `start`, then halves the distance. Memory that is enough for some tokens is enough for
    fewer.
    """
    fitting, failing, tokens = 0, None, min(start, most)
    while not is_over():
        if is_enough(tokens):
            fitting = tokens
        else:
            failing = tokens
        if fitting == most or (failing is not None and failing - fitting <= max(_GRANULE, fitting * _RESOLUTION)):
            break
        tokens = min(2 * fitting, most) if failing is None else (fitting + failing) // 2
        if failing is not None and fitting:
            tokens = min(failing - 1, -(-tokens // _GRANULE) * _GRANULE)
            if tokens <= fitting:
                break
    return fitting, failing


@contextlib.contextmanager
def limited_memory(target: Target, limit_bytes: int) -> Iterator[None]:
    """Limit the memory that torch allocates on a GPU; on a CPU nothing is limited."""
    if not target.is_gpu:
        yield
        return
    total = torch.cuda.get_device_properties(target.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), target.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, target.device)


@torch.no_grad()
def measure_memory(
    target: Target,
    config: PreTrainedConfig,
    start: int,
    most: int,
    limit_bytes: int,
    chunk_tokens: int,
    deadline: Deadline,
    failures: Failures,
    folder: Path | None = None,
) -> list[LongestSequence]:
    """Print one table. On a GPU torch may allocate `limit_bytes`, including weights and slots."""
    limit = f"{limit_bytes / 2**30:.0f} GiB" if target.is_gpu else "NO LIMIT (a CPU)"
    table = ResultTable(
        "memory",
        f"The longest sequence, {config.num_hidden_layers} layers, experts streamed through {_SLOTS} slots, {limit}",
        ["hybrid prefill", "KV", "longest", "does not fit", "against the first"],
        conditions(target),
        folder,
    )
    torch._dynamo.reset()
    target.free_memory()
    model = build_model(config, target)
    store = moepass.offload_experts(model, slots=_SLOTS, device=target.device).store
    target.free_memory()
    results: list[LongestSequence] = []
    with limited_memory(target, limit_bytes):
        for chunk in (None, chunk_tokens):
            for keeps_kv in (False, True):
                result = LongestSequence(chunk, keeps_kv)
                if deadline.is_over:
                    result = dataclasses.replace(result, reason=f"the part's {deadline.seconds:.0f} s were over")
                else:
                    try:
                        search = _search(target, config, model, chunk, keeps_kv)
                        tokens, beyond = longest(search, start, most, lambda: deadline.is_over)
                        result = dataclasses.replace(result, tokens=tokens, beyond=beyond)
                    except Exception as error:
                        result = dataclasses.replace(result, reason=failures.add(error))
                results.append(result)
                table.add(*_cells(result, results[0]))
    held = (held_bytes(model, target.device) + store.device_bytes) / 2**30
    table.finish(
        f"In tokens of one sequence, found by bisection to {_RESOLUTION:.0%}; one token's logits. hybrid prefill: "
        f"token-wise segments in chunks of the given number of tokens. KV: keys and values of all layers are kept. "
        f"{held:.2f} GiB of the memory are dense weights and slots"
        f"{'' if target.is_gpu else ' (on a CPU the experts as well)'}."
    )
    return results


def _search(
    target: Target, config: PreTrainedConfig, model: Any, chunk_tokens: int | None, keeps_kv: bool
) -> Callable[[int], bool]:
    """Compile `model`, and return a function that checks if one sequence of a given length fits."""
    torch._dynamo.reset()
    options = {} if chunk_tokens is None else {"chunk_tokens": chunk_tokens}
    compiled = torch.compile(model, backend="asyncep", options=options)

    def is_enough(tokens: int) -> bool:
        ids = token_ids(config, 1, tokens, target.device)
        return fits(target, lambda: compiled(input_ids=ids, use_cache=keeps_kv, logits_to_keep=1))

    return is_enough


def _cells(result: LongestSequence, first: LongestSequence) -> list[str]:
    chunk = "off" if result.chunk_tokens is None else str(result.chunk_tokens)
    start = [chunk, "kept" if result.keeps_kv else "not kept"]
    if result.reason:
        return [*start, f"not measured: {result.reason}", "-", "-"]
    beyond = "nothing tried" if result.beyond is None else str(result.beyond)
    ratio = f"{result.tokens / first.tokens:.2f}" if first.tokens and first.beyond and result.beyond else "-"
    return [*start, str(result.tokens), beyond, ratio]

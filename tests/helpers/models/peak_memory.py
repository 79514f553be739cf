"""Measure the peak memory of a call."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of the bytes that `run` allocates on the CPU, including a result that torch allocates.

    The allocations are recorded by torch's profiler, which sees those of Inductor's code too. Garbage is collected
    before, because the memory of tensors that `run` does not allocate but frees would count as negative.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    del result
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda memory_event: memory_event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak

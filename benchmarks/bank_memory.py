"""Measure the bytes of expert banks on the compute side by model depth: they are slots x bank bytes at every depth.

A model with fewer layers than slots takes one slot for each layer.
"""

from __future__ import annotations

import gc

import torch
import typer

import moepass
from benchmarks.common import print_table, reference_model, verdict


def main(depths: str = "2,6,12", slots: str = "1,2,3") -> None:
    """Print the ring's own count of its bytes, and a count of live byte buffers outside the homes."""
    rows = []
    for depth in [int(text) for text in depths.split(",")]:
        for count in [int(text) for text in slots.split(",")]:
            rows.append(_measure(depth, count))
            torch._dynamo.reset()
            gc.collect()
    print_table(
        "Expert memory on the compute side (MB)",
        ["layers", "slots", "one bank", "all banks, at home", "ring, its account", "ring, counted", "as many x bank"],
        rows,
    )
    if any(row[-1] != "yes" for row in rows):
        raise typer.Exit(1)


def _measure(depth: int, slots: int) -> list[object]:
    model = reference_model(depth)
    report = moepass.offload_experts(model, slots=slots)
    ids = torch.randint(0, 1024, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), moepass.record_compilations() as compilations:
        torch.compile(model, backend="asyncep", options={"lower": "eager"})(ids)
    ring = compilations[0].executor.ring
    assert ring is not None
    bank_bytes = report.home_bytes // depth
    counted = _live_byte_buffers() - report.home_bytes
    right = ring.device_bytes == report.store.device_bytes == counted == min(slots, depth) * bank_bytes
    megabytes = [bank_bytes, report.home_bytes, ring.device_bytes, counted]
    return [depth, slots, *[f"{value / 1e6:.1f}" for value in megabytes], verdict(right)]


def _live_byte_buffers() -> int:
    """Return the bytes of all live uint8 storages: shards and slots, because nothing else here is uint8."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in gc.get_objects()
        if type(value) is torch.Tensor and value.dtype is torch.uint8
    }
    return sum(storages.values())


if __name__ == "__main__":
    typer.run(main)

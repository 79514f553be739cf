"""Compare every family, compiled, resident and streaming, with its uncompiled model."""

from __future__ import annotations

import os

import torch
import typer

import moepass
from benchmarks.common import print_table, verdict
from tests.helpers.models.tiny import TINY_FAMILIES, tiny_inputs, tiny_model

INDUCTOR_LIMIT = 1e-5


def main(families: str = "", inductor: bool = True) -> None:
    """Print, by family and form: bit-identity with lower="eager", largest relative difference with "inductor"."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    names = families.split(",") if families else sorted(TINY_FAMILIES)
    rows = [
        _measure(family, form, dtype, inductor)
        for family in names
        for form in ("grouped_mm", "batched_mm")
        for dtype in (torch.float32, torch.bfloat16)
        if not (family == "llama4" and form == "batched_mm")  # its experts have only one form
    ]
    print_table(
        "Logits of the compiled against the uncompiled model",
        [
            "family",
            "form",
            "dtype",
            "blocks",
            "refused",
            "eager",
            "eager streaming",
            "inductor",
            "uncompiled from fp64",
            "holds",
        ],
        rows,
        "eager: bit-identical or not, without pass compute_chosen_pairs, which rounds the dense experts of llama4 "
        f"otherwise. inductor (streaming): largest difference relative to the largest logit; holds "
        f"up to {INDUCTOR_LIMIT}.",
    )
    if any(row[-1] != "yes" for row in rows):
        raise typer.Exit(1)


def _measure(family: str, form: str, dtype: torch.dtype, inductor: bool) -> list[object]:
    def build() -> torch.nn.Module:
        return tiny_model(family, dtype=dtype, experts_implementation=form)

    inputs = tiny_inputs(build(), batch=3, seq=17)
    with torch.no_grad():
        expected = build()(**inputs).logits
        resident, _ = _run(build(), inputs, "eager", stream=False)
        streaming, plans = _run(build(), inputs, "eager", stream=True)
        difference = own_error = 0.0
        if inductor and dtype is torch.float32:
            logits, _ = _run(build(), inputs, "inductor", stream=True)
            difference = _relative_difference(logits, expected)
            # grouped_mm has no fp64, batched_mm computes the same GEMMs
            precise = tiny_model(family, experts_implementation="batched_mm").double()(**inputs).logits
            own_error = _relative_difference(expected, precise)
    same = [torch.equal(logits, expected) for logits in (resident, streaming)]
    return [
        family,
        form,
        str(dtype).removeprefix("torch."),
        sum(len(plan.blocks) for plan in plans),
        sum(len(plan.refusals) for plan in plans),
        *["identical" if equal else "differs" for equal in same],
        f"{difference:.1e}" if difference else "",
        f"{own_error:.1e}" if own_error else "",
        verdict(all(same) and difference <= INDUCTOR_LIMIT),
    ]


def _relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.double() - expected.double()).abs().max() / expected.double().abs().max())


def _run(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], lower: str, stream: bool
) -> tuple[torch.Tensor, list[moepass.Plan]]:
    torch._dynamo.reset()
    if stream:
        moepass.offload_experts(model)
    options = {"lower": lower, "disable": ["compute_chosen_pairs"] if lower == "eager" else []}
    with moepass.record_compilations() as compilations:
        logits = torch.compile(model, backend="asyncep", options=options)(**inputs).logits
    return logits, [compilation.plan for compilation in compilations]


if __name__ == "__main__":
    typer.run(main)

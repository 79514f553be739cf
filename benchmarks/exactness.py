"""Are the results right? Every family, compiled, resident and streaming, against its uncompiled self."""

from __future__ import annotations

import os

import torch
import typer
from common import print_table, verdict

import moepass
from moepass.models.tiny import TINY_FAMILIES, tiny_inputs, tiny_model

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
        if not (family == "llama4" and form == "batched_mm")  # its experts have one form only
    ]
    print_table(
        "Logits of the compiled against the uncompiled model",
        ["family", "form", "dtype", "blocks", "refused", "eager resident", "eager streaming", "inductor", "holds"],
        rows,
        f"eager: bit-identical or not. inductor, streaming: largest difference relative to the largest logit, at most "
        f"{INDUCTOR_LIMIT} in fp32.",
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
        difference = None
        if inductor and dtype is torch.float32:
            logits, _ = _run(build(), inputs, "inductor", stream=True)
            difference = float((logits - expected).abs().max() / expected.abs().max())
    same = [torch.equal(logits, expected) for logits in (resident, streaming)]
    holds = all(same) and (difference is None or difference <= INDUCTOR_LIMIT)
    return [
        family,
        form,
        str(dtype).removeprefix("torch."),
        sum(len(plan.blocks) for plan in plans),
        sum(len(plan.refusals) for plan in plans),
        *["identical" if equal else "differs" for equal in same],
        "" if difference is None else f"{difference:.1e}",
        verdict(holds),
    ]


def _run(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], lower: str, stream: bool
) -> tuple[torch.Tensor, list[moepass.Plan]]:
    torch._dynamo.reset()
    if stream:
        moepass.offload_experts(model)
    with moepass.record_compilations() as compilations:
        logits = torch.compile(model, backend="asyncep", options={"lower": lower})(**inputs).logits
    return logits, [compilation.plan for compilation in compilations]


if __name__ == "__main__":
    typer.run(main)

"""Accept moepass on a machine with a GPU, in ten minutes: each part is a process with a time limit.

    python -m benchmarks.gpu_acceptance [--output FOLDER] [--part NAME ...]

FOLDER receives acceptance.jsonl and acceptance.txt, a line for each check when it ends, and NAME.log with the errors of
each part. The exit status is 1 if a check failed. If moepass is not installed, it is imported from the source tree.
`--device cpu` tries out the parts that need no GPU.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.acceptance.part_runs import Part, run_parts
from benchmarks.acceptance.results import FAILED, PartChecks, ResultFiles

# The limits add up to less than ten minutes, so that all parts fit into one loan of a machine.
PARTS = (
    Part("versions", 20, "benchmarks.acceptance.attention_checks:versions"),
    Part("attention", 35, "benchmarks.acceptance.attention_checks:attention"),
    Part("serve", 100, "benchmarks.acceptance.serving_checks:serve"),
    Part("memory", 50, "benchmarks.acceptance.engine_checks:memory"),
    Part("ranks", 60, "benchmarks.acceptance.rank_checks:ranks"),
    Part("graphs", 60, "benchmarks.acceptance.graph_checks:graphs"),
    Part("profile", 40, "benchmarks.acceptance.engine_checks:profile_step"),
    Part("kernels", 75, "benchmarks.acceptance.speed_checks:kernels"),
    Part("threshold", 150, "benchmarks.acceptance.speed_checks:threshold"),
)


def run_here(parts: Sequence[Part], device: str, output: Path) -> None:
    """Run the checks of `parts` in this process. What libraries print goes to standard error."""
    results = ResultFiles(output, os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    import torch

    from benchmarks.on_gpu.profiles import profile_of_gpu
    from benchmarks.on_gpu.target import Target

    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    precision = (torch.bfloat16, 2e-2) if where.type == "cuda" else (torch.float32, 1e-4)
    target = Target(where, *precision, profile_of_gpu(where))
    for part in parts:
        function, checks = pkgutil.resolve_name(part.function), PartChecks(part.name, results)
        checks.run_part(functools.partial(function, target, checks, output))


def main(
    output: Path = Path("build/gpu/acceptance"),
    part: list[str] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    here: bool = False,
) -> None:
    """Run all parts, or each named PART. HERE runs them in this process, one after the other, without time limits."""
    names = [known.name for known in PARTS]
    unknown = [name for name in part or () if name not in names]
    if unknown:
        sys.exit(f"unknown parts: {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [known for known in PARTS if not part or known.name in part]
    if here:
        output.mkdir(parents=True, exist_ok=True)
        run_here(chosen, device, output)
        return
    results = ResultFiles(output, sys.stdout)
    results.clear()
    program = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--output", str(output), "--device", device, "--here"]
    run_parts(chosen, lambda known: [*program, "--part", known.name], results)
    verdicts = Counter(result.verdict for result in results.read())
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    sys.exit(1 if verdicts[FAILED] else 0)


if __name__ == "__main__":
    from benchmarks.on_gpu.source_tree import use_source_tree

    use_source_tree()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import typer

    typer.run(main)

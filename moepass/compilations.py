"""Records of compiled graphs, and the context of the passes; stored models need them without the compiler."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import cast

from moepass.models.errors import OptionError
from moepass.models.homes import ADOPTED
from moepass.models.limits import AUTO, FP8
from moepass.options import Options
from moepass.passes.ir.activation_memory import LEAST_CHUNK_TOKENS
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext
from moepass.passes.ir.segment import EAGER
from moepass.passes.machine.hardware import with_emulated_link
from moepass.passes.schedule.predict import decisions_for
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.execute.executor import Executor
from moepass.runtime.execute.run_report import RunReport, run_report


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A graph that the backend compiled. `executor.graph_module` is its schedule."""

    executor: Executor
    context: PassContext

    @property
    def plan(self) -> Plan:
        """The plan, with the refusals that runs have found so far and the segments that CUDA did not record."""
        return self.executor.findings.added_to(self.executor.plan)

    def report(self) -> RunReport:
        """Compare predictions with measurements of the last runs: the step, its waits for banks, and memory.

        The measurements are from the last runs (up to 32) that follow the schedule and have equal input sizes, except
        the first. Every run is measured, on a CPU with the clock, on CUDA with events; there this call waits until all
        work is done. The predictions are for the sizes of these runs. A model that consists of several graphs has a
        compilation for each, and a step is then one run of this graph.

        Values that are not predicted or not measured say why, for example that there is no hardware profile.
        """
        measured = self.executor.measured()
        sizes = measured.sizes or dict(self.plan.sizes)
        return run_report(decisions_for(self.plan, sizes, self.context), measured)


_recorded: contextvars.ContextVar[list[Compilation] | None] = contextvars.ContextVar("recorded", default=None)


@contextlib.contextmanager
def record_compilations() -> Iterator[list[Compilation]]:
    """Collect what the backend compiles inside the block, in the order of compilation.

    `torch.compile` compiles on the first call, so make that call inside.
    """
    compilations: list[Compilation] = []
    token = _recorded.set(compilations)
    try:
        yield compilations
    finally:
        _recorded.reset(token)


def note_compilation(executor: Executor, context: PassContext) -> None:
    """Add `executor`, whose plan was made in `context`, to the compilations that are being recorded."""
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(Compilation(executor, context))


def pass_context(options: Options, store: BankStore | None, resident: BankStore | None) -> PassContext:
    """Return the context of the passes for any graph of a model, whose banks are in `store`.

    `resident` is the store of a model whose experts were not moved. Raises OptionError if chunk_tokens is "auto" and
    the model has no memory budget, or if the model was placed for another `experts_compute`.
    """
    hardware, link_rate = options.hardware, options.adoption().link.bytes_per_s
    if hardware is not None and link_rate is not None:  # the link is emulated
        hardware = with_emulated_link(hardware, link_rate, [use.link for use in ADOPTED.travel])
    planned = store or resident
    chooses = options.chunk_tokens == AUTO
    if chooses and (planned is None or planned.placed is None or planned.placed.decisions.memory_budget_bytes is None):
        text = (
            f"option chunk_tokens is {AUTO!r}, but the model has no memory budget that limits chunks; pass "
            "memory_budget to offload_experts or load_pretrained, or pass a number of tokens here"
        )
        raise OptionError(text, name="chunk_tokens", value=AUTO)
    if planned is not None:
        _check_experts_compute(options.experts_compute, planned)
    return PassContext(
        slots=store.slots if store else options.adoption().slots,
        disabled=frozenset(options.disable),
        chunk_tokens=LEAST_CHUNK_TOKENS if chooses else cast("int | None", options.chunk_tokens),
        chooses_chunks=chooses,
        all_to_all_below=options.all_to_all_below,
        hardware=hardware,
        transport=options.adoption().transport,
        placed=None if planned is None else planned.placed,
        runs_by_expert=options.lower != EAGER,
        multiplies_in_fp8=options.experts_compute == FP8,
    )


def _check_experts_compute(experts_compute: str, store: BankStore) -> None:
    """Raise OptionError if the placement of the model fits no graph with this `experts_compute`."""
    is_fp8, reason = experts_compute == FP8, ""
    if store.multiplies_in_fp8 and not is_fp8:
        reason = f"the model was placed for {FP8!r}, whose slots are too small for it; compile it with {FP8!r}"
    elif is_fp8 and store.placed is not None and (resident := store.placed.decisions.resident_layers):
        reason = (
            f"the experts of layers {list(resident)} are resident, so they would compute in the model's dtype; pass "
            f"experts_compute={FP8!r} to load_pretrained too, so that all layers stream"
        )
    if reason:
        raise OptionError(
            f"option experts_compute is {experts_compute!r}, but {reason}",
            name="experts_compute",
            value=experts_compute,
        )

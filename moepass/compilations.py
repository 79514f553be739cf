"""What was compiled, for those who ask; and what the passes are told. Apart from the backend, whose imports only those
need who compile: a second start of a stored model does not.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import cast

from moepass.models.errors import OptionError
from moepass.models.homes import ADOPTED
from moepass.models.limits import AUTO
from moepass.options import Options
from moepass.passes.ir.activation_memory import LEAST_CHUNK_TOKENS
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext
from moepass.passes.ir.segment import EAGER
from moepass.passes.machine.hardware import Hardware, with_emulated_link
from moepass.passes.schedule.predict import decisions_for
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.execute.executor import Executor
from moepass.runtime.execute.run_report import RunReport, run_report


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One graph that the backend compiled: the executor, whose `graph_module` is the schedule, and its plan."""

    executor: Executor
    context: PassContext

    @property
    def plan(self) -> Plan:
        return self.executor.plan

    def report(self) -> RunReport:
        """Predicted beside measured values of the last runs: a step, the part of it that waits for banks, memory.

        The last up to 32 runs count that follow the schedule and have inputs of equal sizes, but not the first of
        them. They are always measured, without `record_timeline`: by the clock on a CPU, by events on CUDA, where this
        call waits until all is done. It predicts for their sizes. A model that is several graphs has a compilation for
        each; a step is then one run of this one.

        What is not predicted or not measured says why, for example that there is no hardware profile.
        """
        measured = self.executor.measured()
        sizes = measured.sizes or dict(self.plan.sizes)
        return run_report(
            decisions_for(self.plan, sizes, self.context),
            measured,
            self.executor.weight_bytes,
            self.executor.peak_bytes(),
        )


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
    """Give `executor`, whose plan was made in `context`, to whoever records compilations now."""
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(Compilation(executor, context))


def pass_context(options: Options, store: BankStore | None, whole: BankStore | None) -> PassContext:
    """What `options` and the banks of a model tell the passes about any graph of it.

    The banks are in `store`; or all of them stayed where they were, as planned in `whole`; or none were offloaded.
    """
    planned = store or whole
    chooses = options.chunk_tokens == AUTO
    if chooses and (planned is None or planned.placed is None or planned.placed.decisions.memory_budget_bytes is None):
        raise OptionError(
            f"option chunk_tokens is {AUTO!r}, but the model has no memory budget that chunks could fit into; give "
            "memory_budget to offload_experts or load_pretrained, or a number of tokens here",
            name="chunk_tokens",
            value=AUTO,
        )
    return PassContext(
        slots=store.slots if store else options.adoption().slots,
        disabled=frozenset(options.disable),
        chunk_tokens=LEAST_CHUNK_TOKENS if chooses else cast("int | None", options.chunk_tokens),
        chooses_chunks=chooses,
        all_to_all_below=options.all_to_all_below,
        hardware=_as_linked(options),
        transport=options.adoption().transport,
        placed=None if planned is None else planned.placed,
        runs_by_expert=options.lower != EAGER,
    )


def _as_linked(options: Options) -> Hardware | None:
    """The machine of the options, with their emulated link if they have one."""
    rate = options.adoption().link.bytes_per_s
    if options.hardware is None or rate is None:
        return options.hardware
    return with_emulated_link(options.hardware, rate, [use.link for use in ADOPTED.travel])

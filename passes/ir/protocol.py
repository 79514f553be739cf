"""How passes are written, ordered and watched.

A pass is a function `(module, plan, context) -> PassResult` with a `contract`. It never edits its input: it copies the
graph first. `run_passes` checks the contracts before the first pass runs, skips what was disabled by name, verifies
the graph after every pass, and hands every intermediate graph to an observer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch.fx import GraphModule, Node

from moepass.models.errors import MoepassError, OptionError, one_of
from moepass.passes.ir.placed_model import PlacedModel
from moepass.passes.ir.plan import Plan, Refusal
from moepass.passes.ir.slot_operations import SLOT_OPS, gather
from moepass.passes.machine.hardware import Hardware


class PassError(MoepassError):
    """A pass produced or was given a graph that breaks an invariant. A bug of ours, never a silent change.

    `name` is the pass, `expected` the invariant.
    """


class PlanError(MoepassError):
    """The requested schedule is impossible; the text says what would make it possible."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A process group as one of its ranks sees it; `members` are its ranks in the world, if known, in its own order."""

    rank: int
    ranks: int
    members: tuple[int, ...] = ()

    def has_members_of(self, other: Group) -> bool:
        """True where both groups are known to hold the same ranks in the same order."""
        return bool(self.members) and self == other


@dataclasses.dataclass(frozen=True)
class CaptureNotes:
    """Known facts about how a graph was captured.

    `graph_break` says where and why Dynamo ended it early, in words; empty where it did not. `switches_off` are those
    of Dynamo's settings that would have let it go on, as `torch._dynamo.config.capture_scalar_outputs`.
    """

    graph_break: str = ""
    switches_off: tuple[str, ...] = ()

    def advice(self) -> str:
        """Why the rest of a block may be in another graph, and what to do about it."""
        if self.graph_break:
            return f"the graph ends early: {self.graph_break}"
        advice = "the rest may be in another graph: with fullgraph=True torch says where and why a graph breaks"
        if self.switches_off:
            are = "is" if len(self.switches_off) == 1 else "are"
            advice += (
                f"; it does where sizes come from values (.item(), .tolist(), nonzero, masks) while "
                f"{' and '.join(self.switches_off)} {are} False: set to True before the first run"
            )
        return advice


NO_NOTES = CaptureNotes()


@dataclasses.dataclass(frozen=True)
class PassContext:
    """Everything beside the graph that passes may know.

    `slots` is the size of the ring that the banks stream through; `groups` are the process groups that the graph talks
    to, by name, as this rank sees them. Runs of fewer than `all_to_all_below` tokens per rank are to keep their
    exchanges; None: as many as `hardware` makes worth it, and without a profile none. `transport` is what will gather.
    `placed` says what was decided when the model's experts were placed. `capture` is for the reasons of refusals alone.
    `leave` are blocks of expert parallelism that not all ranks take alike, by name, and why. `runs_by_expert`: segments
    of experts are lowered expert by expert, or to grouped GEMMs of ours, where they can be. `chunk_tokens`: what treats
    every token alone runs at most so many tokens at a time; None: all at once. `chooses_chunks`: each run chooses by
    its sizes, within the memory budget of `placed`.
    """

    slots: int = 2
    disabled: frozenset[str] = frozenset()
    groups: Mapping[str, Group] = dataclasses.field(default_factory=dict)
    all_to_all_below: int | None = None
    hardware: Hardware | None = None
    transport: str = "pull"
    placed: PlacedModel | None = None
    capture: CaptureNotes = NO_NOTES
    leave: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runs_by_expert: bool = False
    chunk_tokens: int | None = None
    chooses_chunks: bool = False


@dataclasses.dataclass(frozen=True)
class PassContract:
    """Tags that must be there before (`requires`), must not (`conflicts`), and are there afterwards (`provides`).

    What a pass that `is_agreed` does must be the same on all ranks: they agree on what to leave.
    """

    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    reorders_collectives: bool = False
    is_agreed: bool = False


@dataclasses.dataclass(frozen=True)
class PassResult:
    module: GraphModule
    plan: Plan
    matches: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class Pass(Protocol):
    __name__: str
    contract: PassContract

    def __call__(self, module: GraphModule, plan: Plan, context: PassContext, /) -> PassResult: ...


def graph_pass(
    *,
    requires: Iterable[str] = (),
    provides: Iterable[str] = (),
    conflicts: Iterable[str] = (),
    reorders_collectives: bool = False,
    is_agreed: bool = False,
) -> Callable[[Callable[[GraphModule, Plan, PassContext], PassResult]], Pass]:
    """Declare a function as a pass, with its contract. The function's name is the pass's only name."""
    tags = frozenset(requires), frozenset(provides), frozenset(conflicts)
    contract = PassContract(*tags, reorders_collectives, is_agreed)

    def declare(function: Callable[[GraphModule, Plan, PassContext], PassResult]) -> Pass:
        function.contract = contract  # type: ignore[attr-defined]
        return cast(Pass, function)

    return declare


Observer = Callable[[str, GraphModule, Plan], None]
# Compares the graph that a pass gave with those of the other ranks: the blocks to leave, by name, and why.
Agree = Callable[[GraphModule, Plan], Mapping[str, str]]


def check_order(passes: Sequence[Pass], disabled: frozenset[str]) -> None:
    """Raises OptionError where a disabled name is unknown, or where a later pass needs what a disabled one provides."""
    names = [function.__name__ for function in passes]
    unknown = disabled - set(names)
    if unknown:
        raise OptionError(
            f"disable: no pass is called {one_of(unknown)}; the passes are {', '.join(names)}",
            name="disable",
            value=sorted(unknown),
            expected=names,
        )
    provided: set[str] = set()
    for function in passes:
        if function.__name__ in disabled:
            continue
        contract = function.contract
        missing = contract.requires - provided
        if missing:
            providers = [other.__name__ for other in passes if other.contract.provides & missing]
            raise OptionError(
                f"pass {function.__name__} needs {one_of(missing)}, which {one_of(providers) or 'no pass'} provides: "
                f"do not disable it, or disable {function.__name__} too",
                name=function.__name__,
                expected=sorted(missing),
            )
        clash = contract.conflicts & provided
        if clash:
            raise OptionError(
                f"pass {function.__name__} cannot run after {one_of(clash)} was provided",
                name=function.__name__,
                value=sorted(clash),
            )
        provided |= contract.provides


def run_passes(
    passes: Sequence[Pass],
    module: GraphModule,
    plan: Plan,
    context: PassContext,
    observe: Observer | None = None,
    agree: Agree | None = None,
) -> PassResult:
    """Run `passes` in order. Raises OptionError (wrong order), PlanError (no schedule), PassError (a broken graph).

    Where a pass has to do the same on all ranks, `agree` is asked, and the pass run again without what has to be left,
    until there is nothing more to leave.
    """
    check_order(passes, context.disabled)
    result = PassResult(module, plan)
    matches: list[str] = []
    if observe:
        observe("captured", module, plan)
    for function in passes:
        ask = agree if function.contract.is_agreed else None
        if function.__name__ in context.disabled:
            if ask:
                ask(result.module, result.plan)  # the others must hear that this rank takes nothing
            continue
        before, plan_before = result.module, result.plan
        result = function(before, plan_before, context)
        while ask and (found := ask(result.module, result.plan)).keys() - context.leave.keys():
            context = dataclasses.replace(context, leave={**context.leave, **found})
            result = function(before, plan_before, context)
        matches.extend(f"{function.__name__}: {match}" for match in result.matches)
        check_graph(before, result.module, function.__name__, function.contract)
        if observe:
            observe(function.__name__, result.module, result.plan)
    return dataclasses.replace(result, matches=tuple(matches), refusals=result.plan.refusals)


def check_graph(before: GraphModule, after: GraphModule, name: str, contract: PassContract) -> None:
    """Invariants of every pass. Raises PassError with the name of the pass and of the invariant that it broke."""
    for invariant, check in INVARIANTS.items():
        problem = check(before, after, contract)
        if problem:
            raise PassError(f"pass {name} broke `{invariant}`: {problem}", name=name, expected=invariant)


def _lint(before: GraphModule, after: GraphModule, contract: PassContract) -> str | None:
    try:
        after.graph.lint()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def _values_present(before: GraphModule, after: GraphModule, contract: PassContract) -> str | None:
    for node in after.graph.nodes:
        if node.op == "output" or node.target in SLOT_OPS:
            continue
        if node.op in ("placeholder", "call_function") and "val" not in node.meta:
            had_one = any("val" in other.meta for other in before.graph.nodes if other.name == node.name)
            if had_one or node.target is gather:
                return f'node {node.name} lost its meta["val"]'
    return None


def _same_interface(before: GraphModule, after: GraphModule, contract: PassContract) -> str | None:
    for role, op in (("inputs", "placeholder"), ("output", "output")):
        old = [_signature(node) for node in before.graph.nodes if node.op == op]
        new = [_signature(node) for node in after.graph.nodes if node.op == op]
        if not _agree(old, new):
            return f"the {role} changed from {old} to {new}"
    return None


# The signature of a size that only a run tells.
_ANY_SIZE = "any size"


def _agree(old: Any, new: Any) -> bool:
    """Equal, but for sizes of which nothing was known before."""
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(map(_agree, old, new))
    return old in (new, _ANY_SIZE)


def _signature(node: Node) -> object:
    if node.op == "placeholder":
        return _value_signature(node.meta.get("val"))
    return torch.fx.node.map_arg(node.args[0], lambda value: _value_signature(value.meta.get("val")))


def _value_signature(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(map(_size_signature, value.shape)), str(value.dtype), str(value.device))
    return _size_signature(value)


def _size_signature(size: object) -> str:
    """What is known of a size before a run; sizes that are read from tensors are `_ANY_SIZE`."""
    if isinstance(size, torch.SymInt):
        env = size.node.shape_env
        if any(env.is_unbacked_symint(symbol) for symbol in size.node.expr.free_symbols):
            return _ANY_SIZE
    return str(size)


def _same_collectives(before: GraphModule, after: GraphModule, contract: PassContract) -> str | None:
    if contract.reorders_collectives:
        return None
    old, new = _collectives(before), _collectives(after)
    return None if old == new else f"the order of collectives changed from {old} to {new}"


def _collectives(module: GraphModule) -> list[str]:
    order: list[str] = []
    for node in module.graph.nodes:
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, GraphModule):
            # Equal segments are one module: what it holds runs as often as it is called.
            order += _collectives(called)
        elif isinstance(node.target, torch._ops.OpOverload) and "_c10d_functional" in node.target.namespace:
            order.append(str(node.target))
    return order


INVARIANTS: dict[str, Callable[[GraphModule, GraphModule, PassContract], str | None]] = {
    "the graph lints": _lint,
    "every value is described": _values_present,
    "inputs and outputs stay": _same_interface,
    "collectives keep their order": _same_collectives,
}

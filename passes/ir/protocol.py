"""The interface of passes: how they are written, ordered and checked.

A pass is a function `(module, plan, context) -> PassResult` with a `contract`. It copies the graph before it edits it.
`run_passes` checks the contracts before the first pass runs, skips passes that are disabled by name, verifies the graph
after every pass, and calls an observer with every intermediate graph.
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
    """A pass received or produced a graph that breaks an invariant: a bug in moepass.

    `name` is the pass, `expected` the invariant.
    """


class PlanError(MoepassError):
    """The requested schedule is impossible; the text says what would make it possible."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A process group as one of its ranks sees it.

    `members` are the global ranks in the group's order; empty if unknown.
    """

    rank: int
    ranks: int
    members: tuple[int, ...] = ()

    def has_members_of(self, group: Group) -> bool:
        """Return whether both groups are known to have the same ranks in the same order."""
        return bool(self.members) and self == group


@dataclasses.dataclass(frozen=True)
class CaptureNotes:
    """Facts about the capture of a graph, for the reasons of refusals.

    Attributes:
        graph_break: where and why Dynamo ended the graph early, in words; empty if it did not
        switches_off: Dynamo's settings that are off and would have avoided the break, such as
            `torch._dynamo.config.capture_scalar_outputs`
    """

    graph_break: str = ""
    switches_off: tuple[str, ...] = ()

    def advice(self) -> str:
        """Explain why the missing half of a block may be in another graph, and what to do about it."""
        if self.graph_break:
            return f"the graph ends early: {self.graph_break}"
        advice = "the missing half may be in another graph: with fullgraph=True torch says where and why a graph breaks"
        if self.switches_off:
            advice += (
                "; graphs break at sizes that come from values (.item(), .tolist(), nonzero, masks): set "
                f"{' and '.join(self.switches_off)} to True before the first run"
            )
        return advice


NO_NOTES = CaptureNotes()


@dataclasses.dataclass(frozen=True)
class PassContext:
    """The inputs of passes in addition to the graph.

    Attributes:
        slots: size of the ring through which banks stream
        disabled: names of passes to skip
        groups: process groups of the graph by name, as this rank sees them
        all_to_all_below: runs of fewer tokens per rank keep their exchanges. None derives it from `hardware`; without a
            profile no run does
        transport: the transport that gathers banks
        placed: decisions made when the model's experts were placed
        capture: facts about the capture, used only in reasons of refusals
        leave: names of blocks of expert parallelism that the ranks do not all treat alike, with the reason for each
        runs_by_expert: expert segments are lowered expert by expert, or to our own grouped GEMM kernels, if possible
        multiplies_in_fp8: experts multiply in FP8, in kernels of our own
        chunk_tokens: token-wise operations process at most this many tokens at a time; None for all at once
        chooses_chunks: each run chooses its chunks by its sizes, within the memory budget of `placed`
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
    multiplies_in_fp8: bool = False
    chunk_tokens: int | None = None
    chooses_chunks: bool = False


@dataclasses.dataclass(frozen=True)
class PassContract:
    """The tags that a pass requires before it, that conflict with it, and that it provides.

    If `is_agreed`, the pass must do the same on all ranks, so the ranks agree on which blocks to leave.
    """

    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    reorders_collectives: bool = False
    is_agreed: bool = False


@dataclasses.dataclass(frozen=True)
class PassResult:
    """The graph and plan after a pass, with descriptions of its matches and its refusals."""

    module: GraphModule
    plan: Plan
    matches: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class Pass(Protocol):
    """A function with a contract, as `graph_pass` declares it."""

    __name__: str
    contract: PassContract

    def __call__(self, module: GraphModule, plan: Plan, context: PassContext, /) -> PassResult:
        """Run the pass."""


def graph_pass(
    *,
    requires: Iterable[str] = (),
    provides: Iterable[str] = (),
    conflicts: Iterable[str] = (),
    reorders_collectives: bool = False,
    is_agreed: bool = False,
) -> Callable[[Callable[[GraphModule, Plan, PassContext], PassResult]], Pass]:
    """Declare a function as a pass with this contract. The function's name is the name of the pass."""
    tags = frozenset(requires), frozenset(provides), frozenset(conflicts)
    contract = PassContract(*tags, reorders_collectives, is_agreed)

    def declare(function: Callable[[GraphModule, Plan, PassContext], PassResult]) -> Pass:
        function.contract = contract  # type: ignore[attr-defined]
        return cast(Pass, function)

    return declare


Observer = Callable[[str, GraphModule, Plan], None]
# Compares the result of a pass with those of the other ranks; returns the names of blocks to leave, with reasons.
Agree = Callable[[GraphModule, Plan], Mapping[str, str]]


def check_order(passes: Sequence[Pass], disabled: frozenset[str]) -> None:
    """Raise OptionError if a disabled name is unknown, or if a later pass requires what a disabled one provides."""
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
            providers = [provider.__name__ for provider in passes if provider.contract.provides & missing]
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
    """Run `passes` in order, and check the graph after each of them.

    A pass with `is_agreed` runs again, without the blocks that other ranks leave, until `agree` returns no new ones.

    Args:
        passes: The passes in order.
        module: The captured graph.
        plan: The plan before the first pass.
        context: The inputs of the passes in addition to the graph.
        observe: Called with the name, graph and plan after every pass, and with the captured graph.
        agree: Compares this rank's result with those of the other ranks.

    Raises:
        OptionError: The passes are in the wrong order.
        PlanError: No schedule is possible.
        PassError: A pass broke an invariant.
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
                ask(result.module, result.plan)  # tells the other ranks that this rank leaves every block
            continue
        before, plan_before = result.module, result.plan
        result = function(before, plan_before, context)
        while ask and (left := ask(result.module, result.plan)).keys() - context.leave.keys():
            context = dataclasses.replace(context, leave={**context.leave, **left})
            result = function(before, plan_before, context)
        matches.extend(f"{function.__name__}: {match}" for match in result.matches)
        check_graph(before, result.module, function.__name__, function.contract)
        if observe:
            observe(function.__name__, result.module, result.plan)
    return dataclasses.replace(result, matches=tuple(matches), refusals=result.plan.refusals)


def check_graph(before: GraphModule, after: GraphModule, name: str, contract: PassContract) -> None:
    """Raise PassError, with the name of the pass and of the invariant, if `after` breaks an invariant."""
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
            had_value = any("val" in old.meta for old in before.graph.nodes if old.name == node.name)
            if had_value or node.target is gather:
                return f'node {node.name} lost its meta["val"]'
    return None


def _same_interface(before: GraphModule, after: GraphModule, contract: PassContract) -> str | None:
    for role, op in (("inputs", "placeholder"), ("output", "output")):
        old = [_signature(node) for node in before.graph.nodes if node.op == op]
        new = [_signature(node) for node in after.graph.nodes if node.op == op]
        if not _agree(old, new):
            return f"the {role} changed from {old} to {new}"
    return None


# The signature of a data-dependent size.
_ANY_SIZE = "any size"


def _agree(old: Any, new: Any) -> bool:
    """Return whether two signatures are equal, ignoring sizes that were unknown before."""
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
    """Return a size as text, or `_ANY_SIZE` if it depends on values of tensors."""
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
            # Equal segments share a module, whose collectives run at every call.
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

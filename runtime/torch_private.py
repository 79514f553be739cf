"""The private parts of torch that the runtime cannot do without, in one place to look at for a new version."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

import torch
from torch._guards import TracingContext
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

# Dynamo and Inductor are imported where they are used: homes and ranks need neither.


def process_groups_by_name() -> dict[str, ProcessGroup]:
    """All process groups of this process that were not destroyed."""
    return {str(group.group_name): group for group in c10d._world.pg_map}


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """The memory at `address` of `device` as a storage that does not keep it: somebody else must."""
    found: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return found  # type: ignore[no-any-return]


def default_group() -> ProcessGroup:
    """Raises ValueError if torch.distributed is not initialised."""
    return c10d._get_default_group()


def store_of(group: ProcessGroup) -> Store:
    """The store through which the ranks of `group` met."""
    return c10d._get_process_group_store(group)


def compiled_code() -> CodeType | None:
    """The Python function that Dynamo compiles at this moment; None where it compiles none."""
    found: CodeType | None = _compilation().get("code")
    return found


def exceeded_recompile_limit() -> str | None:
    """The limit by which Dynamo leaves a function to eager mode, as `recompile_limit=8`; None where it compiles it.

    For functions called by `on_recompilation`, which Dynamo does right before it decides.
    """
    from torch._dynamo.cache_size import exceeds_recompile_limit

    found = _compilation()
    if "cache_size" not in found:
        return None
    is_exceeded, name = exceeds_recompile_limit(found["cache_size"], found["compile_id"])
    return f"{name}={getattr(torch._dynamo.config, name)}" if is_exceeded else None


def on_recompilation(function: Callable[[], None]) -> None:
    """Call `function` whenever Dynamo is about to compile a function again. The user gets the errors that it raises."""
    from torch._dynamo.utils import register_hook_for_recompile_user_context

    def hook() -> str:
        function()
        return ""

    register_hook_for_recompile_user_context(hook)


def suppresses_errors() -> bool:
    """Whether Dynamo runs a function in eager mode where compiling it raises."""
    return bool(torch._dynamo.config.suppress_errors)


def is_autocasting() -> bool:
    """Whether autocast is on for some kind of device."""
    return bool(torch._C._is_any_autocast_enabled())


def is_always_equal(size: int, other: int) -> bool:
    """Whether two sizes are equal. Of sizes that a capture leaves open: for all inputs, without a guard on these."""
    if not torch.compiler.is_compiling():
        return size == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size == other)


def constraint_violation_error() -> type[Exception]:
    """What Dynamo raises where a size that was marked as dynamic is one number in the graph."""
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    return ConstraintViolationError


@contextlib.contextmanager
def quiet_log(name: str) -> Iterator[None]:
    """In this block the log `name` writes nothing: torch logs some errors with a traceback, and raises them as well."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def frames_compiled() -> tuple[int, int]:
    """How many functions Dynamo has begun to compile, and how many it has compiled."""
    from torch._dynamo.utils import counters

    found = counters["frames"]
    return found["total"], found["ok"]


def eager_stance() -> str | None:
    """The stance of torch.compiler in which Dynamo runs what is not compiled yet in eager mode; None in others."""
    from torch._dynamo import eval_frame

    stance: str = eval_frame._stance.stance
    return stance if stance == "eager_on_recompile" else None


def inductor_source(compiled: object) -> str | None:
    """The Python module that Inductor wrote, where that is all of `compiled`, which runs on a CPU; None elsewhere."""
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(compiled, CompiledFxGraph) or set(compiled.device_types) - {"cpu"}:
        return None
    parts = (
        compiled.constants,
        compiled.frozen_param_names,
        compiled.torchbind_constants,
        compiled.opaque_value_type_classes,
        compiled.inputs_to_check,
        compiled.extern_libs_key,
        compiled._wrap_compiled_regions,
    )
    return None if any(parts) else compiled.source_code


def load_generated_module(source: str) -> ModuleType:
    """`source` as a module, from a file in Inductor's cache, where Triton and readers find it."""
    from torch._inductor.codecache import PyCodeCache

    module: ModuleType = PyCodeCache.load(source)
    return module


def load_inductor_source(source: str) -> Callable[[list[Any]], Any]:
    """The output of `inductor_source` as a function of a list of inputs. It runs the text: never pass other text.

    What it compiles is taken from Inductor's cache where that has it.
    """
    from torch._inductor.codecache import PyCodeCache

    call: Callable[[list[Any]], Any] = PyCodeCache.load(source).call
    return call


@contextlib.contextmanager
def compilers_side_by_side() -> Iterator[None]:
    """What Inductor compiles in this block is ready when the block ends, and not before.

    Inductor hands the kernels of a graph to C++ compilers and waits for them before it turns to the next graph. Here it
    waits for those of all graphs at the end, so that the compilers of several graphs run at the same time. Other
    threads compile as always.

    Raises what a compiler raises, when the block ends.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    if _waits.pending is not None:
        yield
        return
    _let_waits_be_put_off(AsyncCompile)
    pending: list[Callable[[], None]] = []
    _waits.pending = pending
    is_complete = False
    try:
        yield
        _waits.pending = None
        for wait in pending:
            wait()
        is_complete = True
    finally:
        _waits.pending = None
        if not is_complete:
            PyCodeCache.cache_clear()  # it has modules whose kernels are not there


class _Waits(threading.local):
    """For the compilers of this thread, in the order in which they were put off; None outside of the block."""

    pending: list[Callable[[], None]] | None = None


_waits = _Waits()


def _let_waits_be_put_off(compilers: type[Any]) -> None:
    wait = compilers.wait
    if getattr(wait, "puts_off", False):
        return

    @functools.wraps(wait)
    def wait_or_put_off(self: object, scope: dict[str, Any]) -> None:
        if _waits.pending is None:
            wait(self, scope)
        else:
            _waits.pending.append(functools.partial(wait, self, scope))

    wait_or_put_off.puts_off = True  # type: ignore[attr-defined]
    compilers.wait = wait_or_put_off


def vector_instructions() -> str:
    """The vector instructions that Inductor compiles for on this machine's CPU."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return str(pick_vec_isa())


def expect_vector_instructions(expected: str) -> None:
    """Spare Inductor its test compilation where `vector_instructions` gave `expected` on this processor before."""
    from torch._inductor import config, cpu_vec_isa

    if cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
        return  # it has asked
    with config.patch({"cpp.vec_isa_ok": True}):
        found = str(cpu_vec_isa.pick_vec_isa())
    if found != expected:
        # A compiler of then or now cannot do what the processor can: let it ask.
        cpu_vec_isa.valid_vec_isa_list.cache_clear()


def same_layouts(expected: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that says of as many tensors whether each is of the type, device, shape and strides of the expected.

    It is what Dynamo's guards call. It also compares how torch reads them: negated, conjugated, batched by vmap.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes: list[Any] = [list(value.shape) for value in expected]
    strides: list[Any] = [list(value.stride()) for value in expected]
    check: Callable[..., bool] = TensorGuards(*expected, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def traced_code() -> list[CodeType]:
    """The functions whose code stands in the graph that Dynamo captures at this moment."""
    return list(TracingContext.get_traced_code() or ())


def _compilation() -> dict[str, Any]:
    """The variables of the function in which Dynamo compiles at this moment."""
    from torch._dynamo import convert_frame

    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_code.co_filename == convert_frame.__file__:
            return frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return {}


def flash_attention_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [batch, heads, n, dim] and its log-sum-exp [batch, heads, n], which the public function does not give.

    `mask` is added to the scores. GQA needs no repeated keys. Where a query sees no key, its output and log-sum-exp
    are 0.
    """
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scaling
    )
    return found


def memory_efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on CUDA, for as many heads of keys as of queries. The log-sum-exp has up to 31 queries more."""
    output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, is_causal, scale=scaling
    )
    return output, log_sum_exp

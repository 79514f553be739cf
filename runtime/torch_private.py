"""The private parts of torch that the runtime needs, in one file to check for a new version of torch."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

import torch
from torch._guards import TracingContext
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from moepass.models.errors import MoepassError

# Dynamo and Inductor are imported where they are used: homes and ranks need neither.


@contextlib.contextmanager
def errors_past_dynamo() -> Iterator[None]:
    """Let `torch.compile` raise a MoepassError of this block itself.

    Dynamo would put it into a BackendCompilerFailed, which it raises after it has removed its own frames.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    class BackendRefusal(BackendCompilerFailed):
        def remove_dynamo_frames(self) -> Any:
            return self.inner_exception

    try:
        yield
    except MoepassError as error:
        if TracingContext.try_get() is None:  # Dynamo has not called this block
            raise
        raise BackendRefusal("asyncep", error, None) from error


def trace_without_warning(functions: Iterable[Callable[..., Any]]) -> None:
    """Let Dynamo trace functions that functools.lru_cache wraps without its warning that their caches are ignored.

    Only for functions whose results do not change while the process runs.
    """
    from torch._dynamo.utils import allow_lru_cache_wrapper_trace_without_warning

    for function in functions:
        allow_lru_cache_wrapper_trace_without_warning(function)  # type: ignore[arg-type]


def process_groups_by_name() -> dict[str, ProcessGroup]:
    """Return all process groups of this process that were not destroyed."""
    return {str(group.group_name): group for group in c10d._world.pg_map}


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage at `address` of `device` that does not keep the memory alive: the caller must."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return storage  # type: ignore[no-any-return]


def default_group() -> ProcessGroup:
    """Return the default process group. Raises ValueError if torch.distributed is not initialised."""
    return c10d._get_default_group()


def store_of(group: ProcessGroup) -> Store:
    """Return the store that the ranks of `group` rendezvous through."""
    return c10d._get_process_group_store(group)


def compiled_code() -> CodeType | None:
    """Return the code of the Python function that Dynamo is compiling; None if it is not compiling."""
    code: CodeType | None = _compilation().get("code")
    return code


def exceeded_recompile_limit() -> str | None:
    """Return the limit, such as `recompile_limit=8`, that stops Dynamo from compiling a function; None if none does.

    Call it in a function of `on_recompilation`, which Dynamo calls right before it decides.
    """
    from torch._dynamo.cache_size import exceeds_recompile_limit

    variables = _compilation()
    if "cache_size" not in variables:
        return None
    is_exceeded, name = exceeds_recompile_limit(variables["cache_size"], variables["compile_id"])
    return f"{name}={getattr(torch._dynamo.config, name)}" if is_exceeded else None


def on_recompilation(function: Callable[[], None]) -> None:
    """Call `function` whenever Dynamo is about to compile a function again. Its errors reach the user."""
    from torch._dynamo.utils import register_hook_for_recompile_user_context

    def hook() -> str:
        function()
        return ""

    register_hook_for_recompile_user_context(hook)


def is_autocasting() -> bool:
    """Return whether autocast is on for any kind of device."""
    return bool(torch._C._is_any_autocast_enabled())


def constraint_violation_error() -> type[Exception]:
    """Return the error that Dynamo raises if a size that was marked as dynamic is constant in the graph."""
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    return ConstraintViolationError


@contextlib.contextmanager
def quiet_log(name: str) -> Iterator[None]:
    """Silence the log `name` in a block: torch logs some errors with a traceback and raises them as well."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def frames_compiled() -> tuple[int, int]:
    """Return how many functions Dynamo has begun to compile, and how many it has compiled."""
    from torch._dynamo.utils import counters

    frames = counters["frames"]
    return frames["total"], frames["ok"]


def eager_stance() -> str | None:
    """Return the stance of torch.compiler if Dynamo runs functions eagerly instead of compiling them; else None."""
    from torch._dynamo import eval_frame

    stance: str = eval_frame._stance.stance
    return stance if stance == "eager_on_recompile" else None


def inductor_source(compiled: object) -> str | None:
    """Return the Python module that Inductor wrote for `compiled`; None if it needs other data, or a GPU."""
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(compiled, CompiledFxGraph) or set(compiled.device_types) - {"cpu"}:
        return None
    dependencies = (
        compiled.constants,
        compiled.frozen_param_names,
        compiled.torchbind_constants,
        compiled.opaque_value_type_classes,
        compiled.inputs_to_check,
        compiled.extern_libs_key,
        compiled._wrap_compiled_regions,
    )
    return None if any(dependencies) else compiled.source_code


def load_generated_module(source: str) -> ModuleType:
    """Import `source` from a file in Inductor's cache, because Triton reads the source of kernels from files."""
    from torch._inductor.codecache import PyCodeCache

    module: ModuleType = PyCodeCache.load(source)
    return module


def load_inductor_source(source: str) -> Callable[[list[Any]], Any]:
    """Return a callable for a list of inputs from the output of `inductor_source`. Runs the text: pass no other text.

    Kernels come from Inductor's cache if they are there.
    """
    call: Callable[[list[Any]], Any] = load_generated_module(source).call
    return call


@contextlib.contextmanager
def compilers_side_by_side() -> Iterator[None]:
    """Let the compilers of several graphs run at the same time; nothing that Inductor compiles is ready before the end.

    Inductor hands the kernels of a graph to C++ compilers and waits for them before it turns to the next graph. This
    block postpones all these waits to its end. Other threads compile as always. Errors are raised at the end.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    if _waits.pending is not None:
        yield
        return
    _let_waits_be_put_off(AsyncCompile)
    pending: list[Callable[[], None]] = []
    _waits.pending = pending
    try:
        yield
        _waits.pending = None
        for wait in pending:
            wait()
    except BaseException:
        PyCodeCache.cache_clear()  # it has modules without their kernels
        raise
    finally:
        _waits.pending = None


class _Waits(threading.local):
    """The postponed waits of each thread, in order; None outside of the block."""

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
    """Return the vector instructions for which Inductor compiles on this machine's CPU."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return str(pick_vec_isa())


def expect_vector_instructions(expected: str) -> None:
    """Spare Inductor its test compilation if `vector_instructions` returned `expected` on this processor before."""
    from torch._inductor import config, cpu_vec_isa

    if cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
        return  # it has compiled already
    with config.patch({"cpp.vec_isa_ok": True}):
        instructions = str(cpu_vec_isa.pick_vec_isa())
    if instructions != expected:
        # The compiler changed, and one of the two does not support the processor: let Inductor test it.
        cpu_vec_isa.valid_vec_isa_list.cache_clear()


def same_layouts(expected: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function of tensors that checks each for the type, device, shape and strides of the expected one.

    Dynamo's guards call it. It also compares whether tensors are negated, conjugated, or batched by vmap.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes: list[Any] = [list(value.shape) for value in expected]
    strides: list[Any] = [list(value.stride()) for value in expected]
    check: Callable[..., bool] = TensorGuards(*expected, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def traced_code() -> list[CodeType]:
    """Return the functions whose code is part of the graph that Dynamo is capturing."""
    return list(TracingContext.get_traced_code() or ())


def _compilation() -> dict[str, Any]:
    """Return the local variables of Dynamo's compiling function; empty if it is not compiling."""
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
    """Return attention [batch, heads, n, dim] and its log-sum-exp [batch, heads, n], which torch's function omits.

    `mask` is added to the scores. GQA needs no repeated keys. If a query sees no key, its output and log-sum-exp are 0.
    """
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scaling
    )
    return result


def memory_efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and log-sum-exp on CUDA, for equal numbers of heads; the log-sum-exp has up to 31 more rows."""
    output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, is_causal, scale=scaling
    )
    return output, log_sum_exp

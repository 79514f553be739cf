"""Compiled graphs at work: memory, errors, threads, two models, garbage, gradients."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import moepass
from moepass.passes.graph.nodes import copy_graph_module
from moepass.passes.ir.protocol import PassContext
from moepass.passes.ir.slot_operations import acquire, prefetch, release
from moepass.passes.segments.partition import partition
from moepass.runtime.execute.bound_graph import SegmentError
from moepass.runtime.execute.executor import Executor
from moepass.runtime.lowering.lower_segments import lower_segments
from moepass.runtime.transfer.copying import CopyError, SlotCopy
from moepass.runtime.transfer.link import Link
from tests.helpers.graphs.backend_helper import BLOCKS, Stack, find, streamed, tokens, up_to

MODES: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode]


def _compiled(model: nn.Module, lower: str = "eager", debug: bool = True) -> Any:
    return torch.compile(model, backend="asyncep", options={"lower": lower, "debug": debug})


def _first_run(model: nn.Module, *inputs: torch.Tensor, debug: bool = True) -> tuple[Any, Executor]:
    """Run `model` once. Returns the compiled model and the executor of its only graph."""
    with moepass.record_compilations() as compilations, torch.no_grad():
        compiled = _compiled(model, debug=debug)
        compiled(*inputs)
    (compilation,) = compilations
    return compiled, compilation.executor


def _banked(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "store")]


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.usefixtures("no_grad")
def test_streaming_is_exact_with_any_number_of_slots(form: str, slots: int) -> None:
    model = Stack(form, depth=4, bias=True)
    expected = model(tokens())
    moepass.offload_experts(model, slots=slots)
    compiled = _compiled(model)
    for _ in range(3):
        assert torch.equal(compiled(tokens()), expected)


def _live_bytes() -> int:
    """Return the bytes of all living uint8 storages: the packed banks and the slots."""
    gc.collect()
    seen = {}
    for value in gc.get_objects():
        if type(value) is torch.Tensor and value.dtype == torch.uint8:
            # What AOT traces with looks like a tensor, but has no memory.
            with contextlib.suppress(RuntimeError):
                seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(seen.values())


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ring_bytes_are_slots_times_the_largest_bank_whatever_the_depth(depth: int) -> None:
    before = _live_bytes()
    model = Stack("dense_bmm", depth=depth)
    report = moepass.offload_experts(model, slots=2)
    resting = _live_bytes() - before
    compiled, executor = _first_run(model, tokens())
    with torch.no_grad():
        compiled(tokens())
    largest = max(bank.spec.format.slot_bytes for bank in report.store.banks)
    assert executor.ring is not None
    assert executor.ring.device_bytes == report.ring_bytes == executor.plan.device_bank_bytes == 2 * largest
    assert resting == report.home_bytes == depth * largest
    assert _live_bytes() - before == report.home_bytes + 2 * largest
    # Two runs, and both slots filled for a third one.
    assert executor.ring.statistics.copied_bytes == 2 * report.home_bytes + report.ring_bytes


@pytest.mark.slow
def test_banks_of_different_sizes_share_slots_of_the_largest() -> None:
    model = Stack("batched_mm", depth=3)
    model.blocks[1] = BLOCKS["batched_mm"](width=128)
    with torch.no_grad():
        expected = model(tokens())
    report = moepass.offload_experts(model)
    compiled, executor = _first_run(model, tokens())
    assert executor.ring is not None
    assert executor.ring.device_bytes == 2 * report.store.banks[1].spec.format.slot_bytes
    with torch.no_grad():
        assert torch.equal(compiled(tokens()), expected)


@pytest.mark.slow
def test_all_shapes_of_a_model_share_one_ring() -> None:
    model = Stack("batched_mm", depth=2)
    moepass.offload_experts(model)
    with moepass.record_compilations() as compilations, torch.no_grad():
        compiled = torch.compile(model, backend="asyncep", dynamic=False, options={"lower": "eager"})
        for count in (3, 5, 7):
            compiled(tokens(count))
    assert len(compilations) == 3
    assert len({id(item.executor.ring) for item in compilations}) == 1


def test_the_schedule_is_a_graph_that_prints() -> None:
    model = Stack(depth=2)
    moepass.offload_experts(model)
    _, executor = _first_run(model, tokens())
    text = executor.graph_module.print_readable(print_output=False)
    assert text.index("self.prefetch") < text.index("self.acquire") < text.index("self.release")


def test_poison_makes_a_broken_schedule_visible() -> None:
    """The release comes directly after the acquire, which the passes would refuse."""
    model = Stack("dense_bmm", depth=2)
    captured = streamed(model, tokens())
    good = up_to("schedule", captured.module)
    broken = copy_graph_module(good.module)
    find(broken, acquire)[1].append(find(broken, release)[1])
    store = _banked(model)[0].store
    for module, finite in ((good.module, True), (broken, False)):
        cut = partition(module, good.plan, PassContext())
        executor = Executor(lower_segments(cut.module, "eager").top, cut.plan, store.ring(debug=True))
        with torch.no_grad():
            (output,) = executor(list(captured.inputs))
        assert bool(output.isfinite().all()) is finite
        if not finite:
            assert bool(output.isnan().all())


def _break_segment(executor: Executor, number: int) -> Callable[[], None]:
    """Make the call of segment `number` raise. Returns a function that repairs it."""
    located = [module for module in executor.graph_module.modules() if type(module).__name__ == "SegmentCall"][number]
    original = located.segment

    class Broken(nn.Module):
        def forward(self, *inputs: Any) -> Any:
            raise ZeroDivisionError("by hand")

    located.segment = Broken()

    def repair() -> None:
        located.segment = original

    return repair


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_exception_in_a_segment_names_the_layer_and_the_ring_goes_on(number: int) -> None:
    model = Stack("dense_bmm", depth=4)
    with torch.no_grad():
        expected = model(tokens())
    moepass.offload_experts(model, home=moepass.Host(link="emulate:1e7"))
    compiled, executor = _first_run(model, tokens())
    repair = _break_segment(executor, number)
    with (
        torch.no_grad(),
        pytest.raises(SegmentError, match=r"in segment_\d.*blocks\.\d.*ZeroDivisionError: by hand") as caught,
    ):
        compiled(tokens())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    repair()
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(compiled(tokens()), expected)


@pytest.mark.slow
def test_an_exception_in_a_copy_names_the_layer_and_the_ring_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack("dense_bmm", depth=4)
    with torch.no_grad():
        expected = model(tokens())
    report = moepass.offload_experts(model)
    compiled, _ = _first_run(model, tokens())
    bad = report.store.banks[2].shard
    address = bad.data_ptr()
    real = ctypes.memmove

    def failing(target: int, source: int, size: int) -> object:
        if source == address:
            raise OSError("the bus is on fire")
        return real(target, source, size)

    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "memmove", failing)
        with torch.no_grad(), pytest.raises(CopyError, match=r"bank blocks\.2 .*the bus is on fire") as caught:
            compiled(tokens())
    assert isinstance(caught.value.__cause__, OSError)
    with torch.no_grad():
        assert torch.equal(compiled(tokens()), expected)


def test_an_interrupt_leaves_the_ring_usable() -> None:
    model = Stack("dense_bmm", depth=3)
    with torch.no_grad():
        expected = model(tokens())
    moepass.offload_experts(model, home=moepass.Host(link="emulate:1e7"))
    compiled, executor = _first_run(model, tokens())
    ring = executor.ring
    assert ring is not None
    acquire_as_ever = ring.acquire

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    ring.acquire = interrupted  # type: ignore[method-assign]
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        compiled(tokens())
    ring.acquire = acquire_as_ever  # type: ignore[method-assign]
    with torch.no_grad():
        assert torch.equal(compiled(tokens()), expected)


@pytest.mark.slow
def test_two_compiled_models_take_turns() -> None:
    models = [Stack("batched_mm", depth=2), Stack("dense_bmm", depth=3)]
    with torch.no_grad():
        expected = [model(tokens()) for model in models]
        for model in models:
            moepass.offload_experts(model)
        compiled = [_compiled(model) for model in models]
        for _ in range(3):
            for run, want in zip(compiled, expected, strict=True):
                assert torch.equal(run(tokens()), want)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 4])
def test_threads_that_call_one_compiled_model_get_their_own_results(threads: int) -> None:
    model = Stack("batched_mm", depth=3)
    inputs = [tokens(seed=seed) for seed in range(threads)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    moepass.offload_experts(model, home=moepass.Host(link="emulate:2e8"))
    compiled, _ = _first_run(model, inputs[0])
    right: list[bool] = []
    barrier = threading.Barrier(threads)

    def work(mine: int) -> None:
        barrier.wait()
        with torch.no_grad():
            right.extend(torch.equal(compiled(inputs[mine]), expected[mine]) for _ in range(8))

    workers = [threading.Thread(target=work, args=(mine,)) for mine in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert right == [True] * (8 * threads)


@pytest.mark.slow
def test_threads_with_two_models_and_two_shapes_get_their_own_results() -> None:
    models = [Stack("batched_mm", depth=2), Stack("dense_bmm", depth=2)]
    jobs = [(model, tokens(count)) for model in models for count in (4, 9)]
    with torch.no_grad():
        expected = [model(x) for model, x in jobs]
        for model in models:
            moepass.offload_experts(model)
        compiled = {
            id(model): torch.compile(model, backend="asyncep", dynamic=False, options={"lower": "eager"})
            for model in models
        }
        for model, x in jobs:
            compiled[id(model)](x)
    right: list[bool] = []

    def work(job: int) -> None:
        model, x = jobs[job]
        with torch.no_grad():
            right.extend(torch.equal(compiled[id(model)](x), expected[job]) for _ in range(8))

    workers = [threading.Thread(target=work, args=(job,)) for job in range(len(jobs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert right == [True] * 32


@contextlib.contextmanager
def _calling(model: Stack, call: Callable[[], object]) -> Iterator[None]:
    """Make layer 1 of `model` call `call` while it runs, through an operator that is opaque to the compiler."""
    library = torch.library.Library("moepass_tests", "FRAGMENT")
    library.define("call(Tensor x) -> Tensor")

    def run(x: torch.Tensor) -> torch.Tensor:
        call()
        return x.clone()

    library.impl("call", run, "CPU")
    torch.library.register_fake("moepass_tests::call", lambda x: x.clone(), lib=library)

    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.moepass_tests.call(x)
            return result

    model.linears[1] = nn.Sequential(model.linears[1], Calls())
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [6, 9])
def test_a_run_inside_a_run_of_the_same_thread_is_refused(shape: int) -> None:
    """The inner run is of the same graph, or of another graph of the model."""
    model, calls = Stack("dense_bmm", depth=3), [lambda: None]
    with torch.no_grad(), _calling(model, lambda: calls[0]()):
        expected = {count: model(tokens(count)) for count in (6, 9)}
        moepass.offload_experts(model, slots=1)
        compiled = torch.compile(model, backend="asyncep", dynamic=False, options={"lower": "eager", "debug": True})
        for count in (6, 9):
            compiled(tokens(count))
        calls[0] = lambda: compiled(tokens(shape))
        with pytest.raises(SegmentError, match=r"another run of this model is under way in this thread"):
            compiled(tokens())
        calls[0] = lambda: None
        for count in (6, 9, 6):
            assert torch.equal(compiled(tokens(count)), expected[count])


@pytest.mark.slow
def test_a_refused_run_that_is_caught_does_not_disturb_the_outer_one() -> None:
    model = Stack("dense_bmm", depth=3)
    refused: list[moepass.InputError] = []
    calls: list[Callable[[], object]] = [lambda: None]

    def inner() -> None:
        try:
            compiled(tokens(seed=5))
        except moepass.InputError as error:
            refused.append(error)

    with torch.no_grad(), _calling(model, lambda: calls[0]()):
        expected = model(tokens())
        moepass.offload_experts(model, home=moepass.Host(link="emulate:5e7"))
        compiled, _ = _first_run(model, tokens())
        calls[0] = inner
        for _ in range(3):
            assert torch.equal(compiled(tokens()), expected)
    assert len(refused) == 3


@pytest.mark.slow
def test_a_signal_handler_that_calls_the_model_is_refused_or_comes_between_runs() -> None:
    model = Stack("dense_bmm", depth=4)
    with torch.no_grad():
        expected = model(tokens())
    moepass.offload_experts(model, home=moepass.Host(link="emulate:2e7"))
    compiled, _ = _first_run(model, tokens())
    refused: list[moepass.InputError] = []

    def handler(*_: object) -> None:
        try:
            compiled(tokens(seed=5))
        except moepass.InputError as error:
            refused.append(error)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with torch.no_grad():
            for _ in range(5):
                signal.setitimer(signal.ITIMER_REAL, 0.005)
                assert torch.equal(compiled(tokens()), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert refused


def _copy_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "moepass-copy"}


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_deleted_model_takes_its_banks_its_ring_and_its_thread_along(lower: str) -> None:
    """Dynamo keeps the compiled code, because nothing is reset before the check."""
    gc.collect()
    threads_before = _copy_threads()
    before = _live_bytes()
    model = Stack("dense_bmm", depth=3)
    report = moepass.offload_experts(model)
    compiled = _compiled(model, lower)
    with torch.no_grad():
        compiled(tokens())
        model(tokens())
    (worker,) = _copy_threads() - threads_before
    gone = [weakref.ref(report.store), weakref.ref(report.store.ring()), *map(weakref.ref, _banked(model))]
    del model, compiled, report
    gc.collect()
    worker.join(timeout=5)
    assert [reference() for reference in gone] == [None] * len(gone)
    assert not worker.is_alive()
    assert _live_bytes() == before


@pytest.mark.slow
def test_a_schedule_whose_model_is_gone_says_so() -> None:
    model = Stack("dense_bmm", depth=2)
    moepass.offload_experts(model)
    compiled, executor = _first_run(model, tokens())
    del model, compiled
    gc.collect()
    with pytest.raises(moepass.InputError, match="the model of this compiled graph was deleted"):
        executor([tokens()])


@pytest.mark.sampled(every=4)
@pytest.mark.covering(2)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_no_grad_and_inference_mode_serve_each_other(order: tuple[int, int], offloaded: bool, lower: str) -> None:
    model = Stack("dense_bmm", depth=2)
    with torch.no_grad():
        expected = model(tokens())
    first, second = (MODES[mode] for mode in order)
    with first():
        if offloaded:
            moepass.offload_experts(model)
        compiled = _compiled(model, lower)
        outputs = [compiled(tokens())]
    for mode in (second, first):
        with mode():
            outputs.append(compiled(tokens()))
    for output in outputs:
        torch.testing.assert_close(output.clone(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_transfers_overlap_with_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer computes until the next layer's bank has arrived: without overlap it would wait forever."""

    class Waiting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.moepass_tests.wait_for_next_bank(x)
            return result

    came, layers = threading.Semaphore(0), itertools.count()
    perform = SlotCopy.perform

    def counted(copy: SlotCopy, link: Link) -> None:
        perform(copy, link)
        came.release()

    def wait_for_next_bank(x: torch.Tensor) -> torch.Tensor:
        # The bank of this layer and the next one before the first layer ends, one more for each layer but the last.
        layer = next(layers) % 4
        for _ in range((2, 1, 1, 0)[layer]):
            assert came.acquire(timeout=60), f"no transfer while layer {layer} computes"
        return x.clone()

    library = torch.library.Library("moepass_tests", "FRAGMENT")
    library.define("wait_for_next_bank(Tensor x) -> Tensor")
    library.impl("wait_for_next_bank", wait_for_next_bank, "CPU")
    torch.library.register_fake("moepass_tests::wait_for_next_bank", lambda x: x.clone(), lib=library)
    monkeypatch.setattr(SlotCopy, "perform", counted)
    model = Stack("dense_bmm", depth=4)
    for layer in range(4):
        model.linears[layer] = nn.Sequential(Waiting(), model.linears[layer])
    moepass.offload_experts(model)
    _first_run(model, tokens(), debug=False)
    assert next(layers) == 4
    library._destroy()


def test_gradients_and_training_are_refused_by_name() -> None:
    model = Stack("dense_bmm", depth=1)
    with pytest.raises(moepass.InputError, match=r"asyncep compiles inference only.*torch\.no_grad\(\)"):
        _compiled(model)(tokens().requires_grad_())
    torch._dynamo.reset()
    with pytest.raises(moepass.InputError, match=r"asyncep compiles inference only.*torch\.no_grad\(\)"):
        _compiled(nn.Linear(32, 32))(tokens())


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_dropout_in_training_mode_is_refused(lower: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)).train()
    with (
        torch.no_grad(),
        pytest.raises(moepass.InputError, match=r"draws random numbers .* call model\.eval\(\) first"),
    ):
        _compiled(model, lower)(tokens())


class Jitter(nn.Module):
    """Noise on the router's input in training mode, as in mixtral; inside a branch or not."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def noisy(x: torch.Tensor) -> torch.Tensor:
            return x * torch.empty_like(x).uniform_(0.9, 1.1)

        if not self.training:
            return x.clone()
        return torch.cond(x.sum() > 0, noisy, torch.clone, (x,)) if self.branch else noisy(x)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_noise_in_training_mode_is_refused(lower: str, branch: bool) -> None:
    model = nn.Sequential(Jitter(branch), nn.Linear(32, 32)).train()
    with torch.no_grad():
        with pytest.raises(moepass.InputError, match=r".* draws random numbers .* call model\.eval\(\) first"):
            _compiled(model, lower)(tokens())
        model.eval()
        torch.testing.assert_close(_compiled(model, lower)(tokens()), model(tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_training_mode_that_draws_nothing_gives_what_the_plain_model_gives(lower: str) -> None:
    """A graph does not say that its modules are in training mode. Without gradients and noise it is correct."""
    models = [nn.Sequential(nn.BatchNorm1d(32), Stack("dense_bmm", depth=2), nn.Dropout(0.0)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, model = (model.train() for model in models)
    moepass.offload_experts(model)
    with torch.no_grad():
        torch.testing.assert_close(_compiled(model, lower)(tokens()), plain(tokens()))
    torch.testing.assert_close(model[0].running_mean, plain[0].running_mean)


@pytest.mark.slow
def test_the_ring_waits_out_the_previous_run_of_another_graph() -> None:
    """Two graphs of one model alternate: each starts with the slots that the other one has left."""
    model = Stack("batched_mm", depth=3)
    with torch.no_grad():
        expected = {count: model(tokens(count)) for count in (4, 9)}
        moepass.offload_experts(model, slots=3)
        compiled = torch.compile(model, backend="asyncep", dynamic=False, options={"lower": "eager", "debug": True})
        for count in (4, 9, 4, 9):
            assert torch.equal(compiled(tokens(count)), expected[count])


def test_a_plan_without_its_ring_is_refused() -> None:
    captured = streamed(Stack("dense_bmm", depth=1), tokens())
    cut = up_to("partition", captured.module)
    with pytest.raises(AssertionError, match="needs a ring"):
        Executor(cut.module, dataclasses.replace(cut.plan), None)
    assert find(cut.module, prefetch)

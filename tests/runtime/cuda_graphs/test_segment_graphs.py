"""CUDA graphs of segments, on emulated streams: recorded, replayed and refused segments give equal results.

The emulation (`fake_cuda_graphs`) poisons free memory of the pool. It enforces one rule of CUDA on recordings only:
values cannot be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import moepass
from moepass.passes.ir.segment import CudaGraphUse, NotRecorded, Segment
from moepass.runtime.cuda_graphs import recorded_call, segment_graphs
from moepass.runtime.cuda_graphs.recorded_call import ExpectedTensor, GraphMemory, RecordedCall, without_ownership
from moepass.runtime.cuda_graphs.segment_graphs import GraphedRun, SegmentGraphs
from moepass.runtime.execute.bound_graph import SegmentCall, SegmentError
from moepass.runtime.execute.executor import Executor
from moepass.runtime.lowering.lower_segments import lower_segments
from moepass.runtime.transfer import ring as ring_module
from moepass.runtime.transfer.copier import Copier
from moepass.runtime.transfer.lanes import StreamLane
from tests.helpers.graphs.backend_helper import HIDDEN, Stack, capture, tokens, up_to
from tests.helpers.processes.fake_cuda import FakeCuda
from tests.helpers.processes.fake_cuda_graphs import CaptureError, FakeGraph, FakeGraphs

CPU = torch.device("cpu")
LAYERS = 4
TRACED = 5
REFUSED = NotRecorded("", "refused by the test")
Record = Callable[[tuple[Segment, ...]], tuple[Segment, ...]]


def _record_all(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    return tuple(dataclasses.replace(segment, cuda_graph=CudaGraphUse()) for segment in segments)


@dataclasses.dataclass
class Compiled:
    """A partitioned graph with its inputs for any number of tokens."""

    model: nn.Module
    cut: Any
    inputs: list[Any]
    store: Any

    def arguments(self, value: torch.Tensor) -> list[Any]:
        def argument(old: Any) -> Any:
            if isinstance(old, int):
                return len(value)
            return value if old.shape == (TRACED, HIDDEN) else old

        return [argument(old) for old in self.inputs]

    def executor(self, record: Record, debug: bool) -> Executor:
        plan = dataclasses.replace(self.cut.plan, segments=record(self.cut.plan.segments))
        ring = None if self.store is None else self.store.ring(debug=debug)
        return Executor(lower_segments(self.cut.module, "eager").top, plan, ring, cudagraphs=True)


@functools.cache
def _compiled(slots: int, layers: int = LAYERS) -> Compiled:
    """Return a compiled stack. With 0 `slots` the experts are resident."""
    torch._dynamo.reset()
    model = Stack("dense_bmm", depth=layers)
    report = moepass.offload_experts(model, slots=slots) if slots else None
    captured = capture(model, tokens(TRACED), dynamic=True)
    cut = up_to("partition", captured.module, slots or 2)
    return Compiled(model, cut, captured.inputs, report and report.store)


@contextlib.contextmanager
def _emulated(seed: int, compiled: Compiled) -> Iterator[tuple[FakeCuda, FakeGraphs]]:
    """Emulate CUDA in a block, with a new ring for the banks of `compiled`."""
    cuda = FakeCuda(random.Random(seed))
    with torch.no_grad(), cuda.installed(issues_operators=False), FakeGraphs(cuda).installed() as graphs:
        if compiled.store is None:
            yield cuda, graphs
        else:
            copier = mock.patch.object(ring_module, "make_copier", side_effect=lambda *_: Copier(StreamLane(CPU)))
            with copier, mock.patch.object(compiled.store, "current_ring", None):
                yield cuda, graphs


def _wrong_runs(
    seed: int, compiled: Compiled, counts: Sequence[int], record: Record = _record_all, debug: bool = True
) -> tuple[list[int], Executor, FakeGraphs]:
    """Run for each number of tokens in `counts`; return the runs whose result differs from the model's."""
    values = [tokens(count, seed=number) for number, count in enumerate(counts)]
    with torch.no_grad():
        expected = [compiled.model(value) for value in values]
    with _emulated(seed, compiled) as (cuda, graphs):
        executor = compiled.executor(record, debug)
        outputs = []
        for value in values:
            # Each run has new activations, and those of the last run may be freed.
            outputs += executor(compiled.arguments(value.clone()))
        cuda.finish()
    wrong = [number for number, pair in enumerate(zip(outputs, expected, strict=True)) if not torch.equal(*pair)]
    return wrong, executor, graphs


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    slots=st.integers(0, 3),
    counts=st.lists(st.sampled_from((4, 6, 7)), min_size=1, max_size=9),
    keep=st.integers(0, 255),
)
def test_results_are_those_of_the_model(seed: int, slots: int, counts: list[int], keep: int) -> None:
    """Shapes and slots change, and only some segments are recorded."""

    def record(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return tuple(
            dataclasses.replace(segment, cuda_graph=CudaGraphUse(None if keep >> number & 1 else REFUSED))
            for number, segment in enumerate(segments)
        )

    assert _wrong_runs(seed, _compiled(slots), counts, record)[0] == []


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("slots", [0, 1, 2, 3])
def test_runs_of_one_shape_are_recorded_once_and_replayed(slots: int) -> None:
    wrong, executor, graphs = _wrong_runs(0, _compiled(slots), [5] * 9)
    assert wrong == []
    calls = sum(len(segment.uses) for segment in executor.plan.segments)
    assert executor.graphs is not None
    statistics = executor.graphs.statistics
    assert statistics.plain == {"in the first run of a shape": 1}
    assert not statistics.stopped
    # With four banks and three slots, each run begins with the next buffer.
    orders = 3 if slots == 3 else 1
    assert (statistics.recorded, statistics.replayed) == (orders, 8 - orders)
    assert (graphs.recorded, graphs.replayed) == (orders * calls, 8 * calls)
    # Only the input of the graph is staged, not the values between recorded calls.
    assert executor.graphs._memory is not None
    assert sum(nbytes for _, nbytes in executor.graphs._memory._staging) == tokens(5).nbytes


@pytest.mark.slow
def test_shapes_beyond_the_limit_run_without_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_graphs, "MOST_SHAPES", 2)
    wrong, executor, _ = _wrong_runs(1, _compiled(2), [3, 4, 6] * 3)
    assert wrong == []
    assert executor.graphs is not None
    statistics = executor.graphs.statistics
    assert (statistics.recorded, statistics.replayed) == (2, 2)
    assert statistics.plain == {"in the first run of a shape": 3, "of a new shape, after 2 shapes were recorded": 2}


def test_other_parameters_are_recorded_again() -> None:
    """One executor serves two equal models, whose parameters have different addresses."""
    compiled = _compiled(0)
    second = Stack("dense_bmm", depth=LAYERS)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(-0.5)
    by_address = dict(zip(map(id, compiled.model.parameters()), second.parameters(), strict=True))
    on_second = dataclasses.replace(compiled, inputs=[by_address.get(id(old), old) for old in compiled.inputs])
    with _emulated(3, compiled) as (cuda, _):
        executor = compiled.executor(_record_all, debug=False)
        outputs = [executor(variant.arguments(tokens(6)))[0] for variant in [compiled, on_second] * 4]
        cuda.finish()
    with torch.no_grad():
        expected = [model(tokens(6)) for model in (compiled.model, second)]
    assert all(map(torch.equal, outputs, expected * 4))
    assert executor.graphs is not None
    assert (executor.graphs.statistics.recorded, executor.graphs.statistics.replayed) == (2, 5)


def test_the_plan_reports_a_segment_that_cuda_cannot_record() -> None:
    begin = FakeGraph.capture_begin
    calls = 0

    def fail_once(graph: FakeGraph, **how: Any) -> None:
        nonlocal calls
        calls += 1
        begin(graph, **how)
        if calls == 2:
            graph.capture_end()
            raise CaptureError("operation not permitted when stream is capturing")

    with mock.patch.object(FakeGraph, "capture_begin", fail_once):
        wrong, executor, graphs = _wrong_runs(4, _compiled(2), [5] * 4)
    assert wrong == []
    segments = executor.findings.added_to(executor.plan).segments
    refusals = [segment.cuda_graph and segment.cuda_graph.refusal for segment in segments]
    reason = "no CUDA graph: CUDA does not record it: CaptureError: operation not permitted when stream is capturing"
    assert [str(refusal) for refusal in refusals if refusal] == [reason]
    assert graphs.replayed > 0


def test_a_recording_that_an_exception_ended_is_repeated() -> None:
    compiled = _compiled(2)
    with _emulated(5, compiled) as (cuda, _):
        executor = compiled.executor(_record_all, debug=True)
        outputs = [executor(compiled.arguments(tokens(6)))]
        located = [module for module in executor.graph_module.modules() if isinstance(module, SegmentCall)][2]

        def fail(*inputs: Any) -> Any:
            raise ZeroDivisionError

        with mock.patch.object(located, "segment", fail), pytest.raises(SegmentError):
            executor(compiled.arguments(tokens(6)))
        outputs += [executor(compiled.arguments(tokens(6))) for _ in range(3)]
        cuda.finish()
    with torch.no_grad():
        expected = compiled.model(tokens(6))
    assert all(torch.equal(output, expected) for (output,) in outputs)
    assert executor.graphs is not None
    assert (executor.graphs.statistics.recorded, executor.graphs.statistics.replayed) == (1, 2)


def test_the_error_in_a_recording_is_raised_and_no_garbage_is_collected_in_it() -> None:
    with _emulated(6, _compiled(0)), mock.patch.object(FakeGraph, "capture_end", side_effect=RuntimeError("invalid")):
        memory = GraphMemory(CPU)

        def fail() -> None:
            assert not gc.isenabled()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            memory.record(fail)
    assert gc.isenabled()


def test_a_run_within_a_run_is_not_recorded() -> None:
    graphs = SegmentGraphs((), lambda name, reason: None)
    with _emulated(6, _compiled(0)):
        with graphs.run(CPU, {"s0": 4}, []) as first:
            assert first is None
        with graphs.run(CPU, {"s0": 4}, []) as outer, graphs.run(CPU, {"s0": 4}, []) as inner:
            assert outer is not None
            assert inner is None
    assert graphs.statistics.plain == {"in the first run of a shape": 1, "while another run used the CUDA graphs": 1}


# ---- What the emulation notices --------------------------------------------------------------------------------------


def _ignore_addresses(expected: ExpectedTensor, value: object) -> bool:
    return _is_like(dataclasses.replace(expected, address=None), value)


def _keep_in_the_pool(run: GraphedRun, outputs: Any) -> Any:
    return outputs


def _without_slots(fixed: Sequence[torch.Tensor]) -> Any:
    """Return the key of a recording without slots, whose dtype is uint8."""
    return _addresses([value for value in fixed if value.dtype != torch.uint8])


def _without_sizes(graphs: SegmentGraphs, device: Any, sizes: Any, fixed: Sequence[torch.Tensor]) -> Any:
    return _run(graphs, device, {}, fixed)


def _everything_is_fixed(memory: Any, segment: Any, inputs: Any, is_fixed: Any) -> Any:
    return _record_call(memory, segment, inputs, lambda value: True)


def _without_owners(memory: Any, segment: Any, inputs: Any, is_fixed: Any) -> Any:
    """Let the pool take the memory of outputs back before they are read."""
    call, outputs = _record_call(memory, segment, inputs, is_fixed)
    return call, tuple(map(without_ownership, outputs))


def _replay_what_comes(call: RecordedCall, inputs: Sequence[Any]) -> Any:
    """Replay without staging, so that the inputs of the recording are read again."""
    with mock.patch.object(call, "_staged", []):
        return _replay(call, inputs)


_is_like, _replay, _run = ExpectedTensor.is_like, RecordedCall.replay, SegmentGraphs.run
_record_call, _addresses = recorded_call.record_call, segment_graphs._addresses


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        [(ExpectedTensor, "is_like", _ignore_addresses), (segment_graphs, "_addresses", _without_slots)],
        [(ExpectedTensor, "is_like", _ignore_addresses), (segment_graphs, "record_call", _everything_is_fixed)],
        [(GraphedRun, "own", _keep_in_the_pool)],
        [(RecordedCall, "replay", _replay_what_comes)],
        [(segment_graphs, "record_call", _without_owners)],
    ],
    ids=["slots", "activations", "outputs", "staging", "lifetimes"],
)
def test_the_emulation_notices_a_key_or_a_copy_that_is_missing(broken: list[tuple[Any, str, Any]]) -> None:
    with contextlib.ExitStack() as patches:
        for owner, name, function in broken:
            patches.enter_context(mock.patch.object(owner, name, function))
        assert any(_wrong_runs(seed, _compiled(3), [5, 5, 5, 5, 7, 5])[0] for seed in range(3))


@pytest.mark.parametrize(
    "broken",
    [(segment_graphs, "_addresses", _without_slots), (SegmentGraphs, "run", _without_sizes)],
    ids=["slots", "sizes"],
)
def test_a_call_with_other_inputs_than_recorded_is_not_replayed(broken: tuple[Any, str, Any]) -> None:
    """Each call checks its inputs, so an incomplete key costs replays but never changes a result."""
    with mock.patch.object(*broken):
        wrong, executor, _ = _wrong_runs(7, _compiled(3), [5, 5, 5, 6, 5, 6])
    assert wrong == []
    assert executor.graphs is not None
    assert sum(executor.graphs.statistics.stopped.values()) > 0


def test_views_of_inputs_are_views_of_the_new_inputs() -> None:
    """A view of a staged input must not be a view of the staging buffer, which the next call overwrites."""
    weight = tokens(3)

    def segment(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return value[1:].t(), value.view(torch.int32)[:, ::2], value @ weight.t(), value[:0]

    with _emulated(8, _compiled(0)) as (cuda, _):
        memory = GraphMemory(CPU)
        values = [torch.cat([tokens(2, seed=seed), tokens(4, seed=seed)])[2:] for seed in range(4)]
        call, outputs = recorded_call.record_call(memory, segment, [values[0]], lambda value: False)
        results = [tuple(map(torch.clone, outputs))]
        views = []
        for value in values[1:]:
            replayed = call.replay([value])
            assert replayed is not None
            results.append(tuple(map(torch.clone, replayed)))
            views.append(replayed[:2])
        assert call.replay([values[0].double()]) is None
        assert call.replay([values[0].t().contiguous().t()]) is None
        assert call.replay([values[0][1:]]) is None
        cuda.finish()
    for value, made in zip(values, results, strict=True):
        assert all(map(torch.equal, made, segment(value)))
    for value, made in zip(values[1:], views, strict=True):
        assert [view.untyped_storage().data_ptr() for view in made] == [value.untyped_storage().data_ptr()] * 2
        assert all(map(torch.equal, made, segment(value)))

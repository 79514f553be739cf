"""Dense segments are lowered to TensorRT and the others are not; refusals of TensorRT have reasons.

TensorRT is not installed: `stand_in_tensorrt` replaces it, records the calls, and runs the exported graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import moepass
from moepass.models.errors import OptionError
from moepass.options import Options, parse_options
from moepass.passes.finish import with_lowerings
from moepass.passes.graph.nodes import fake_value, graph_inputs
from moepass.passes.ir.segment import TENSORRT, Segment
from moepass.passes.segments import tensorrt_choice
from moepass.passes.segments.cuda_graphs import with_cuda_graphs
from moepass.passes.segments.partition import cut_into_segments
from moepass.passes.segments.tensorrt_choice import with_tensorrt_choices
from moepass.runtime.lowering import lower_segments
from moepass.runtime.lowering.lower_tensorrt import TensorrtEngine, lower_to_tensorrt
from tests.helpers.graphs.backend_helper import EXPERTS, HIDDEN, Stack, tokens
from tests.helpers.graphs.fake_gpu import captured_graph, on_gpu, pretended_gpu, put_on_gpu
from tests.helpers.kernels.stand_in_tensorrt import Given, StandIn, in_one_engine

GPU = torch.device("cuda", 0)


def _put(monkeypatch: pytest.MonkeyPatch, package: Any) -> Any:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", package)
    return package


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in: StandIn = _put(monkeypatch, StandIn())
    return stand_in


class Dense(torch.nn.Module):
    """A norm that computes in float32, two GEMMs, and a result that is a transposed view."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Linear(HIDDEN, HIDDEN, dtype=dtype) for _ in range(2))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.double()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype)
        return self.down(torch.nn.functional.silu(self.up(normed))), self.up(x).t()


def _segment(model: torch.nn.Module, value: torch.Tensor) -> GraphModule:
    cut = cut_into_segments(captured_graph(model, value, lower="inductor"))
    (segment,) = [child for child in cut.top.children() if isinstance(child, GraphModule)]
    return segment


def _values(segment: GraphModule) -> list[torch.Tensor]:
    """Return random values for the inputs of `segment`."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(fake_value(node).shape, generator=random) for node in graph_inputs(segment.graph)]


def test_a_segment_is_exported_and_its_engine_gives_what_the_segment_gives(package: StandIn) -> None:
    segment = _segment(Dense(), tokens())
    engine = lower_to_tensorrt(segment)
    assert isinstance(engine, TensorrtEngine)
    (call,) = package.given
    assert [(tensor.shape, tensor.dtype) for tensor in call.inputs].count(((HIDDEN, HIDDEN), torch.float32)) == 2
    assert (call.settings["device"], call.settings["use_fp32_acc"]) == (torch.device("cpu"), False)
    targets = {str(node.target) for node in call.exported.graph.nodes}
    assert "prims.convert_element_type.default" not in targets
    values = _values(segment)
    outputs = engine(*values)
    expected = segment(*values)
    assert len(outputs) == len(expected) == 2
    for output, value in zip(outputs, expected, strict=True):
        assert torch.equal(output, value)
        assert output.stride() == value.stride()


def test_sums_of_float16_are_float32(package: StandIn) -> None:
    segment = _segment(Dense(torch.float16), tokens(dtype=torch.float16))
    assert isinstance(lower_to_tensorrt(segment), TensorrtEngine)
    assert package.given[0].settings["use_fp32_acc"]


def test_other_strides_are_copied_and_another_type_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(dtype: torch.dtype) -> Callable[[Given], GraphModule]:
        def make(given: Given) -> GraphModule:
            run = given.exported.module()
            return in_one_engine(
                given,
                lambda *inputs: [
                    value.to(dtype).clone(memory_format=torch.contiguous_format) for value in run(*inputs)
                ],
            )

        return make

    segment = _segment(Dense(), tokens())
    values = _values(segment)
    _put(monkeypatch, StandIn(changed(torch.float32)))
    engine = lower_to_tensorrt(segment)
    assert isinstance(engine, TensorrtEngine)
    expected = segment(*values)
    assert [value.stride() for value in engine(*values)] == [value.stride() for value in expected]
    assert all(map(torch.equal, engine(*values), expected))
    _put(monkeypatch, StandIn(changed(torch.bfloat16)))
    engine = lower_to_tensorrt(segment)
    assert isinstance(engine, TensorrtEngine)
    with pytest.raises(RuntimeError, match=r"TensorRT returned \[\(torch.bfloat16, .*but the captured graph has"):
        engine(*values)


def _refuse(given: Given) -> GraphModule:
    raise ValueError("no converter for aten.silu\nand a long trace")


def _unconverted(given: Given) -> GraphModule:
    module = given.exported.module()
    assert isinstance(module, GraphModule)
    return module


def _in_part(given: Given) -> GraphModule:
    made = in_one_engine(given)
    call = next(node for node in made.graph.nodes if node.op == "call_module")
    with made.graph.inserting_after(call):
        item = made.graph.call_function(torch.ops.aten.relu.default, (call,))
    made.graph.output_node().args = (item,)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_refuse, "Torch-TensorRT refuses it: ValueError: no converter for aten.silu"),
        (_unconverted, "Torch-TensorRT leaves .*aten.pow.Tensor_Scalar.* of it to torch"),
        (_in_part, "Torch-TensorRT leaves aten.relu.default of it to torch"),
    ],
)
def test_what_tensorrt_does_not_take_whole_is_refused(monkeypatch: pytest.MonkeyPatch, make: Any, reason: str) -> None:
    _put(monkeypatch, StandIn(make))
    segment = _segment(Dense(), tokens())
    refusal = lower_to_tensorrt(segment)
    assert not isinstance(refusal, TensorrtEngine)
    with pytest.raises(AssertionError, match=f"^not lowered as tensorrt: {reason}$"):
        raise AssertionError(str(refusal))


# ---- The whole way, on a CPU: nothing is compiled by Inductor --------------------------------------------------------


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a GPU, and run operators one by one where Inductor would compile them."""
    monkeypatch.setattr(Options, "check_device", lambda options, device: None)
    monkeypatch.setattr(tensorrt_choice, "_NOT_READ_FROM", ())
    monkeypatch.setattr(lower_segments, "_lower_inductor", lower_segments._lower_eager)


def _stays(segments: tuple[Segment, ...]) -> dict[str, str]:
    return {segment.role: segment.tensorrt.stays for segment in segments if segment.tensorrt}


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_dense_segments_of_a_model_run_as_engines_and_its_experts_do_not(package: StandIn) -> None:
    model = Stack("dense_bmm", depth=3)
    with torch.no_grad():
        expected = [model(tokens(count)) for count in (5, 7)]
    moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep", options={"lower": "tensorrt"})
    with torch.no_grad(), moepass.record_compilations() as compilations:
        outputs = [compiled(tokens(count)) for count in (5, 7)]
    for output, value in zip(outputs, expected, strict=True):
        assert torch.allclose(output, value, atol=1e-5)
    first, second = (compilation.plan for compilation in compilations)
    taken = [segment for segment in first.segments if segment.tensorrt and not segment.tensorrt.stays]
    assert taken
    assert [segment.name for segment in first.segments if segment.lowering and segment.lowering.how == TENSORRT] == [
        segment.name for segment in taken
    ]
    # One engine for all layers that are alike.
    assert len(package.given) == len(taken) < sum(len(segment.uses) for segment in taken)
    assert {"experts"} <= {segment.role for segment in first.segments} - {segment.role for segment in taken}
    # The second shape is captured with an open number of tokens.
    assert any("it has dynamic sizes (s" in stays for stays in _stays(second.segments).values())
    assert not any(segment.lowering and segment.lowering.how == TENSORRT for segment in second.segments)


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_a_refused_segment_runs_and_its_record_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _put(monkeypatch, StandIn(_refuse))
    model = Stack("dense_bmm", depth=2)
    with torch.no_grad(), moepass.record_compilations() as (*_,), moepass.record_compilations() as compilations:
        output = torch.compile(model, backend="asyncep", options={"lower": "tensorrt"})(tokens())
        assert torch.allclose(output, model(tokens()), atol=1e-5)
    (compilation,) = compilations
    refusals = [segment.lowering.refusal for segment in compilation.plan.segments if segment.lowering]
    assert any("ValueError: no converter for aten.silu" in str(refusal) for refusal in refusals)


# ---- Errors, and what stays ------------------------------------------------------------------------------------------


def test_without_the_package_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _put(monkeypatch, None)
    with pytest.raises(OptionError, match=r"needs Torch-TensorRT.*pip install 'moepass\[tensorrt\]', or use"):
        parse_options({"lower": "tensorrt"}).check_device(GPU)


def test_without_a_gpu_an_error_says_so(package: StandIn) -> None:
    model = Stack("dense_bmm", depth=1)
    with (
        torch.no_grad(),
        pytest.raises(moepass.OptionError, match="option lower is 'tensorrt', but the graph computes on cpu"),
    ):
        torch.compile(model, backend="asyncep", options={"lower": "tensorrt"})(tokens())
    parse_options({"lower": "tensorrt"}).check_device(GPU)


def test_segments_without_dense_gemms_stay_and_say_why() -> None:
    class Ids(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :EXPERTS].softmax(-1).argmax(-1)

    class OnCpu(Dense):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
            return self.up(x * scale)

    with pretended_gpu():
        value, dense = on_gpu(tokens()), OnCpu()
        put_on_gpu(dense)
        graphs = [captured_graph(Ids(), value), captured_graph(dense, value, torch.empty(()))]
    cuts = [cut_into_segments(graph) for graph in graphs]
    stays = [_stays(with_tensorrt_choices(cut.segments, cut.top)) for cut in cuts]
    assert stays[0] == {"elementwise": "it has no GEMM with dense weights, and TensorRT is used only for these"}
    (on_cpu,) = stays[1].values()
    assert "is on the CPU, but engines read only GPU memory" in on_cpu


@pytest.mark.usefixtures("package")
def test_engines_do_not_become_cuda_graphs() -> None:
    with pretended_gpu():
        dense = Dense()
        put_on_gpu(dense)
        cut = cut_into_segments(captured_graph(dense, on_gpu(tokens()), lower="inductor"))
        lowered = lower_segments.lower_segments(cut.top, TENSORRT)
    (segment,) = with_cuda_graphs(with_lowerings(cut.segments, lowered.lowerings), cut.top)
    assert segment.lowering is not None
    assert segment.cuda_graph is not None
    assert (segment.lowering.how, str(segment.cuda_graph.refusal)) == (
        TENSORRT,
        "no CUDA graph: TensorRT runs it on a separate stream",
    )

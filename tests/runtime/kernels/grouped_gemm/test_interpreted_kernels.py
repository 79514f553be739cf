"""Generated kernels of segments of experts, in Triton's interpreter, against the segments in float64."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from moepass.passes.graph.nodes import is_call
from moepass.passes.ir.segment import NotLowered
from moepass.passes.segments.expert_kernels import read_kernels
from moepass.passes.segments.expert_program import read_program
from moepass.runtime.kernels.grouped_gemm.kernel_source import COLUMNS_CONTIGUOUS, INNER_CONTIGUOUS, POINTERS
from moepass.runtime.kernels.grouped_gemm.launch import GeneratedGemm
from moepass.runtime.kernels.grouped_gemm.tile_sizes import TileSizes, tile_sizes
from moepass.runtime.lowering.lower_segments import decompositions
from moepass.runtime.lowering.lower_triton_experts import TritonExperts, lower_to_triton
from tests.helpers.models.expert_segments import (
    ACTIVATIONS,
    FORMS,
    ExpertInputs,
    ExpertSizes,
    expert_inputs,
    expert_segment,
)

SIZES = ExpertSizes(tokens=40, pairs=75, experts=5, hidden=48, width=24)
# One expert has most of the rows, one has none.
SKEWED = torch.tensor([8.0, 0.0, 1.0, 1.0, 0.2])
# The largest error relative to the largest value: sums of products, with the rounding of each type.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def _run(activation: str, form: str, inputs: ExpertInputs) -> torch.Tensor:
    lowered = lower_to_triton(expert_segment(activation, form, inputs), lambda graph: lambda inputs: graph(*inputs))
    assert isinstance(lowered, TritonExperts), lowered
    (result,) = lowered(inputs.tensors())
    return result


def _in_float64(activation: str, form: str, inputs: ExpertInputs) -> torch.Tensor:
    exact = ExpertInputs(*(value.double() if value.is_floating_point() else value for value in inputs.tensors()))
    (result,) = expert_segment(activation, form, exact)(*exact.tensors())
    return result


def _assert_right(activation: str, form: str, inputs: ExpertInputs) -> None:
    result, expected = _run(activation, form, inputs), _in_float64(activation, form, inputs)
    assert result.dtype == inputs.x.dtype
    assert result.shape == expected.shape
    error = (result.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= TOLERANCES[result.dtype]


@pytest.mark.sampled(every=14)
@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_row_work_of_every_kind(activation: str, form: str, dtype: torch.dtype) -> None:
    _assert_right(activation, form, expert_inputs(dataclasses.replace(SIZES, dtype=dtype), SKEWED))


EDGES = {
    "one expert": (40, 75, [1.0]),
    "one token": (1, 2, [1.0, 1.0, 1.0]),
    "one row": (1, 1, [0.0, 1.0, 0.0]),
    "nearly all rows have one expert": (60, 300, [500.0, *[1.0] * 8]),
    "most experts are empty": (40, 75, [0.0] * 9 + [1.0] + [0.0] * 22),
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge: str, dtype: torch.dtype) -> None:
    tokens, pairs, shares = EDGES[edge]
    sizes = ExpertSizes(tokens, pairs, len(shares), hidden=33, width=17, dtype=dtype)
    _assert_right("swiglu", "returned", expert_inputs(sizes, torch.tensor(shares)))


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Request descriptors for all tiles; return the WEIGHT_DESCRIPTOR and ROW_DESCRIPTOR of each launch."""
    launches: list[tuple[int, bool]] = []

    def sizes_with_descriptors(*arguments: Any) -> TileSizes:
        return dataclasses.replace(tile_sizes(*arguments), descriptors=True)

    def launched(gemm: GeneratedGemm, *arguments: Any) -> Any:
        launch = make_launch(gemm, *arguments)
        launches.append((launch.constants["WEIGHT_DESCRIPTOR"], launch.constants["ROW_DESCRIPTOR"]))
        return launch

    make_launch = GeneratedGemm.launch
    monkeypatch.setattr(GeneratedGemm, "launch", launched)
    monkeypatch.setattr("moepass.runtime.kernels.grouped_gemm.launch.tile_sizes", sizes_with_descriptors)
    return launches


@pytest.mark.sampled(every=9)
@pytest.mark.covering(2)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("activation", "form"), [("swiglu", "returned"), ("clamped, interleaved", "biases"), ("geglu", "low rank")]
)
def test_tiles_with_descriptors(
    activation: str, form: str, dtype: torch.dtype, turned: bool, descriptors: list[tuple[int, bool]]
) -> None:
    # Neither rows, columns nor inner elements are whole tiles, and experts begin in the middle of one.
    sizes = dataclasses.replace(SIZES, hidden=40, width=24, dtype=dtype)
    _assert_right(activation, form, expert_inputs(sizes, SKEWED, turned=turned))
    layout = COLUMNS_CONTIGUOUS if turned else INNER_CONTIGUOUS
    # The rows of the first GEMM are chosen by number; those of the last lie side by side.
    assert (descriptors[0], descriptors[-1]) == ((layout, False), (layout, True))


@pytest.mark.parametrize(("hidden", "width"), [(41, 24), (40, 23)])
def test_rows_of_odd_sizes_are_loaded_by_pointers(hidden: int, width: int, descriptors: list[tuple[int, bool]]) -> None:
    _assert_right("swiglu", "returned", expert_inputs(dataclasses.replace(SIZES, hidden=hidden, width=width), SKEWED))
    # Weights [experts, out, in]: the first GEMM reads `hidden` elements of a row, the second one `width`.
    assert [weights for weights, _ in descriptors] == [
        POINTERS if inner % 4 else INNER_CONTIGUOUS for inner in (hidden, width)
    ]
    assert descriptors[1][1] == (width % 4 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_types_and_layouts_of_weights(dtype: torch.dtype, turned: bool) -> None:
    sizes = dataclasses.replace(SIZES, dtype=dtype)
    for activation, form in (("swiglu", "returned"), ("clamped, interleaved", "biases")):
        _assert_right(activation, form, expert_inputs(sizes, SKEWED, turned=turned))


ANY_SIZES = given(
    tokens=st.integers(1, 70),
    pairs=st.integers(1, 150),
    shares=st.lists(st.sampled_from([0.0, 0.1, 1.0, 20.0]), min_size=1, max_size=9).filter(any),
    hidden=st.integers(1, 70),
    width=st.integers(1, 70),
    what=st.sampled_from([("swiglu", "returned"), ("clamped, interleaved", "biases"), ("geglu", "low rank")]),
)


def _assert_right_at(
    tokens: int, pairs: int, shares: list[float], hidden: int, width: int, what: tuple[str, str]
) -> None:
    sizes = ExpertSizes(tokens, pairs, len(shares), hidden, width, rank=3)
    _assert_right(*what, expert_inputs(sizes, torch.tensor(shares)))


test_many_sizes = pytest.mark.slow(settings(max_examples=30)(ANY_SIZES(_assert_right_at)))


def test_no_rows() -> None:
    inputs = expert_inputs(SIZES)
    segment = expert_segment("swiglu", "plain", inputs)
    none = dataclasses.replace(
        inputs, token=inputs.token[:0], expert=inputs.expert[:0], ends=torch.zeros(5, dtype=torch.int32)
    )
    lowered = lower_to_triton(segment, _not_called)
    assert isinstance(lowered, TritonExperts)
    (result,) = lowered(none.tensors())
    assert result.shape == (0, SIZES.hidden)


def _not_called(graph: GraphModule) -> object:
    raise AssertionError("nothing has to be computed before the first GEMM")


def test_gemm_results_of_rows_without_an_expert_are_zero() -> None:
    inputs = expert_inputs(SIZES)
    inputs.ends = (inputs.ends - 7).clamp(min=0)
    result, expected = _run("swiglu", "plain", inputs), _in_float64("swiglu", "plain", inputs)
    assert not result[-7:].any()
    last = int(inputs.ends[-1])
    assert torch.allclose(result[:last].double(), expected[:last], atol=1e-5)


def test_a_decomposed_mask_of_rows() -> None:
    """The fill value of the mask is a tensor in the graph, and a constant of the kernel."""
    inputs = expert_inputs(SIZES, SKEWED)
    mask = torch.rand(SIZES.pairs, 1) < 0.3

    def compute(x: torch.Tensor, up: torch.Tensor, ends: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
        both = torch.ops.transformers.grouped_mm_fallback(x, up.transpose(1, 2), ends)
        return (both.masked_fill(mask, 0.5) * 2,)

    rows = inputs.x[inputs.token]
    arguments = [rows, inputs.up, inputs.ends, mask]
    segment = make_fx(compute, decompositions("inductor"), tracing_mode="fake")(*arguments)
    assert any(node.target is torch.ops.aten.scalar_tensor.default for node in segment.graph.nodes)
    lowered = lower_to_triton(segment, _not_called)
    assert isinstance(lowered, TritonExperts), lowered
    assert [len(kernel.operands) for kernel in lowered.kernels.kernels] == [2]
    (result,) = lowered(list(arguments))
    (expected,) = compute(*arguments)
    assert torch.allclose(result, expected, atol=1e-5)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("cuts", [(2,), (1, 3), (0, 5), (1, 2, 3, 4)])
def test_weights_in_several_ranges_of_experts(cuts: tuple[int, ...]) -> None:
    inputs = expert_inputs(SIZES, SKEWED)
    bounds = (0, *cuts, SIZES.experts)
    # Each range of experts has its own memory, with another distance between experts.
    ranges = [
        torch.cat([inputs.up[low:high], torch.zeros(high - low, number, SIZES.hidden)], dim=1)[:, : 2 * SIZES.width]
        for number, (low, high) in enumerate(itertools.pairwise(bounds))
    ]
    first = _first_kernel(inputs)
    ours = first([inputs.x, inputs.token], [experts.mT for experts in ranges], inputs.ends, SIZES.pairs)
    expected = first([inputs.x, inputs.token], [inputs.up.mT], inputs.ends, SIZES.pairs)
    assert torch.equal(ours[0], expected[0])


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("hidden", [48, 40])
def test_one_descriptor_for_all_experts(hidden: int, turned: bool) -> None:
    """The descriptor reaches from an expert's weights into those of the next expert, which are NaN here."""
    inputs = expert_inputs(dataclasses.replace(SIZES, hidden=hidden), SKEWED, turned=turned)
    inputs.up[3] = torch.nan
    tile = TileSizes(16, 16, 16, 4, 2, descriptors=True)
    kernel, operands, bank = _first_kernel(inputs), [inputs.x, inputs.token], inputs.up.mT
    outputs = [torch.empty(SIZES.pairs, SIZES.width)]
    is_one = {
        len(parts): kernel.launch(operands, parts, inputs.ends, outputs, tile).constants["ONE_BANK"]
        for parts in ([bank], [bank[:2], bank[2:]])
    }
    # With columns side by side, a tile of inner elements would take some of the next expert's.
    assert is_one == {1: not turned or hidden % tile.inner == 0, 2: False}
    (ours,) = kernel(operands, [bank], inputs.ends, SIZES.pairs, tile)
    (parts,) = kernel(operands, [bank[:2], bank[2:]], inputs.ends, SIZES.pairs, tile)
    (pointers,) = kernel(operands, [bank], inputs.ends, SIZES.pairs, dataclasses.replace(tile, descriptors=False))
    begin, end = inputs.ends[2:4].tolist()
    assert ours[begin:end].isnan().all()
    assert torch.cat([ours[:begin], ours[end:]]).isfinite().all()
    assert torch.equal(ours.nan_to_num(), parts.nan_to_num())
    assert torch.equal(ours.nan_to_num(), pointers.nan_to_num())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["biases", "biases, returned"])
@pytest.mark.parametrize("activation", ["swiglu", "clamped, interleaved"])
def test_rows_of_a_tile_may_choose_any_rows_of_a_table(activation: str, form: str) -> None:
    """Most rows choose the row of their expert, which is loaded once per tile; negative indices count from the end."""
    inputs = expert_inputs(SIZES, SKEWED)
    inputs.expert = torch.randint(-SIZES.experts, SIZES.experts, (SIZES.pairs,))
    _assert_right(activation, form, inputs)


def test_ranges_of_different_layouts_are_refused() -> None:
    inputs = expert_inputs(SIZES)
    parts = [inputs.up[:2].mT, inputs.up[2:].mT.contiguous()]
    with pytest.raises(ValueError, match="one layout"):
        _first_kernel(inputs)([inputs.x, inputs.token], parts, inputs.ends, SIZES.pairs)


def _first_kernel(inputs: ExpertInputs) -> GeneratedGemm:
    return GeneratedGemm(read_kernels(read_program(expert_segment("swiglu", "plain", inputs))).kernels[0])


@pytest.mark.parametrize("tile", [TileSizes(16, 16, 16, 4, 2), TileSizes(64, 32, 32, 4, 2, group=1)])
def test_tiles_change_no_result(tile: TileSizes) -> None:
    inputs = expert_inputs(SIZES, SKEWED)
    kernel, operands = _first_kernel(inputs), [inputs.x, inputs.token]
    (ours,) = kernel(operands, [inputs.up.mT], inputs.ends, SIZES.pairs, tile)
    (default,) = kernel(operands, [inputs.up.mT], inputs.ends, SIZES.pairs)
    assert torch.allclose(ours, default, atol=1e-6)


def test_offsets_beyond_32_bits() -> None:
    # Few rows far apart in memory that is never written: 2^31 elements lie between the first and the last one.
    inputs = expert_inputs(dataclasses.replace(SIZES, tokens=4))
    far = torch.empty(3 * (1 << 30) + SIZES.hidden)
    x = far.as_strided((4, SIZES.hidden), (1 << 30, 1))
    x.copy_(inputs.x)
    apart = torch.empty(SIZES.experts << 30).as_strided(inputs.up.shape, (1 << 30, *inputs.up.stride()[1:]))
    apart.copy_(inputs.up)
    kernel = _first_kernel(inputs)
    (ours,) = kernel([x, inputs.token], [apart.mT], inputs.ends, SIZES.pairs)
    (near,) = kernel([inputs.x, inputs.token], [inputs.up.mT], inputs.ends, SIZES.pairs)
    assert torch.equal(ours, near)


@pytest.mark.slow
def test_rows_counted_from_the_end() -> None:
    inputs = expert_inputs(SIZES, SKEWED)
    negative = dataclasses.replace(inputs, token=inputs.token - SIZES.tokens)
    assert torch.equal(_run("swiglu", "plain", negative), _run("swiglu", "plain", inputs))


@pytest.mark.slow
def test_rows_return_to_the_order_of_tokens() -> None:
    inputs = expert_inputs(SIZES, SKEWED)
    sorted_rows, returned = _run("swiglu", "weights last", inputs), _run("swiglu", "returned", inputs)
    assert torch.equal(returned[inputs.order], sorted_rows)
    negative = dataclasses.replace(inputs, order=inputs.order - SIZES.pairs)
    assert torch.equal(_run("swiglu", "returned", negative), returned)
    # Rows without an expert return to their index, too.
    inputs.ends = (inputs.ends - 7).clamp(min=0)
    assert not _run("swiglu", "returned", inputs)[inputs.order[-7:]].any()


def test_only_a_permutation_of_all_rows_is_lowered_as_a_return() -> None:
    inputs = expert_inputs(SIZES)

    def changed(old: Any, new: Any, index: int, value: Any) -> GraphModule:
        segment = expert_segment("swiglu", "returned", inputs)
        (node,) = (node for node in segment.graph.nodes if is_call(node, old))
        node.target, node.args = new, (*node.args[:index], value, *node.args[index + 1 :])
        return segment

    put, aten = torch.ops.aten.index_put.default, torch.ops.aten
    (return_node,) = (n for n in expert_segment("swiglu", "returned", inputs).graph.nodes if is_call(n, put))
    assert len(return_node.args) == 3
    for segment in (
        changed(aten.empty_like.default, aten.zeros_like.default, 1, torch.preserve_format),
        changed(put, put, 3, True),
        changed(aten.arange.default, aten.arange.start, 1, SIZES.pairs + 1),
    ):
        assert isinstance(lower_to_triton(segment, _not_called), NotLowered)


def _kernels_of(activation: str, form: str) -> Sequence[tuple[int, int]]:
    """Return the numbers of tile values and outputs of each kernel."""
    program = read_program(expert_segment(activation, form, expert_inputs(SIZES)))
    return [(len(kernel.values), len(kernel.outputs)) for kernel in read_kernels(program).kernels]


@pytest.mark.slow
def test_nothing_but_gemms_is_launched() -> None:
    for activation in ACTIVATIONS:
        assert len(_kernels_of(activation, "plain")) == len(_kernels_of(activation, "biases")) == 2
        assert len(_kernels_of(activation, "low rank")) == 4

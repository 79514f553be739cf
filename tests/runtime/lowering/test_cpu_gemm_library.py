"""Products of rows and weights on a CPU: both libraries return the same numbers, and the right one is used."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moepass.runtime.lowering import cpu_gemms, lower_experts
from moepass.runtime.lowering.cpu_gemms import multiply
from moepass.runtime.system.device_names import cpu_info

if not torch.backends.mkldnn.is_available():
    pytest.skip("this torch comes without oneDNN", allow_module_level=True)

aten = torch.ops.aten
WITH_ONEDNN = torch.ops.mkldnn._linear_pointwise.default


class _Calls(TorchDispatchMode):
    """Records every operator that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []
        self.rows_for_onednn: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        if func is WITH_ONEDNN:
            self.rows_for_onednn.add(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def held_back(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Set whether MKL counts as held back, on any machine."""
    is_it = bool(request.param)
    monkeypatch.setattr(cpu_gemms, "is_mkl_held_back", lambda: is_it)
    return is_it


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


LAYOUTS = {
    "[out, in]": lambda inner, out: drawn(out, inner).t(),
    "[in, out]": lambda inner, out: drawn(inner, out),
    "columns of [out, in]": lambda inner, out: drawn(out, 2 * inner)[:, :inner].t(),
    "columns of [in, out]": lambda inner, out: drawn(inner, 2 * out)[:, out:],
    "one column for all": lambda inner, out: drawn(inner, 1).expand(inner, out),
    "one row for all": lambda inner, out: drawn(out).expand(inner, out),
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 40),
    inner=st.integers(0, 40),
    out=st.integers(1, 40),
    layout=st.sampled_from(list(LAYOUTS)),
    has_gaps=st.booleans(),
    is_given=st.booleans(),
    is_held_back=st.booleans(),
)
def test_every_gemm_is_right(
    rows: int, inner: int, out: int, layout: str, has_gaps: bool, is_given: bool, is_held_back: bool
) -> None:
    left = drawn(rows, 2 * inner)[:, :inner] if has_gaps else drawn(rows, inner)
    weights = LAYOUTS[layout](inner, out)
    into = torch.full((rows, out), torch.nan) if is_given else None
    bias = drawn(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_gemms, "is_mkl_held_back", lambda: is_held_back)
        patch.setattr(cpu_gemms, "_LEAST_MULTIPLICATIONS", 1)
        product = multiply(left, weights, into)
        with_bias = torch.ops.moepass.gemm(left, weights, bias)
    assert into is None or product is into
    assert product.is_contiguous()
    expected = (left.double() @ weights.double()).float()
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(with_bias, expected + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "dtype", "layout", "is_for_onednn"),
    [
        (64, torch.float32, "[out, in]", True),
        (64, torch.float32, "[in, out]", True),
        (63, torch.float32, "[out, in]", False),
        (64, torch.float32, "columns of [out, in]", False),
        (64, torch.bfloat16, "[out, in]", False),
        (64, torch.float64, "[out, in]", False),
    ],
)
def test_the_library(rows: int, dtype: torch.dtype, layout: str, is_for_onednn: bool, held_back: bool) -> None:
    left, weights = drawn(rows, 128, dtype=dtype), LAYOUTS[layout](128, 256).to(dtype)
    with _Calls() as calls:
        multiply(left, weights, torch.empty(rows, 256, dtype=dtype))
    assert (WITH_ONEDNN in calls.seen) == (is_for_onednn and held_back)
    assert (aten.mm.out in calls.seen) != (is_for_onednn and held_back)


@pytest.mark.parametrize("held_back", [True], indirect=True)
def test_the_switch_of_torch_for_onednn(held_back: bool) -> None:
    left, weights = drawn(64, 128), drawn(128, 256)
    with torch.backends.mkldnn.flags(enabled=False), _Calls() as calls:
        multiply(left, weights)
    assert WITH_ONEDNN not in calls.seen


@pytest.mark.slow
@pytest.mark.parametrize("held_back", [True], indirect=True)
def test_onednn_meets_few_numbers_of_rows(held_back: bool) -> None:
    """It generates code for each number of rows, and routers produce every number."""
    weights = drawn(512, 512)
    left = drawn(lower_experts.CHUNK_ROWS, 512)
    with _Calls() as calls:
        for rows in range(1, len(left) + 1):
            before = len(calls.seen)
            assert multiply(left[:rows], weights).shape == (rows, 512)
            assert rows < 8 or WITH_ONEDNN in calls.seen[before:]
    assert all(count % 4 == 0 for count in calls.rows_for_onednn)
    assert len(calls.rows_for_onednn) == 39
    assert calls.seen.count(WITH_ONEDNN) == len(left) - 7


def test_experts_use_it(held_back: bool) -> None:
    """Rows of no expert are zeros with both libraries."""
    left, weights = drawn(40, 512), drawn(3, 512, 512)
    loop = lower_experts.grouped_gemm_loop(left, weights)
    ends = torch.tensor([10, 12, 30])
    with _Calls() as calls:
        (product,) = loop([left, weights, ends])
    expected = torch.cat([left[:10] @ weights[0].t(), left[10:12] @ weights[1].t(), left[12:30] @ weights[2].t()])
    torch.testing.assert_close(product[:30], expected, rtol=1e-4, atol=1e-4)
    assert not product[30:].any()
    assert calls.seen.count(WITH_ONEDNN) == (2 if held_back else 0)
    assert calls.seen.count(aten.mm.out) == (1 if held_back else 3)


class Projections(nn.Module):
    """Projections with and without a bias, a narrow one, and a product of two activations."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, dtype=dtype)
        self.down = nn.Linear(2 * width, width, bias=False, dtype=dtype)
        self.narrow = nn.Linear(width, 4, dtype=dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.down(F.silu(self.up(rows))) + rows
        return self.narrow(hidden @ (hidden.mT @ hidden))


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 2), (torch.bfloat16, 0)])
def test_projections_of_compiled_segments_use_it(
    dtype: torch.dtype, count: int, held_back: bool, no_grad: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_onednn = mock.Mock(wraps=cpu_gemms._with_onednn)
    monkeypatch.setattr(cpu_gemms, "_with_onednn", with_onednn)
    model = Projections(256, dtype)
    compiled = torch.compile(model, backend="asyncep", dynamic=True)
    for rows in (64, 100):
        left = torch.randn(rows, 256).to(dtype)
        with_onednn.reset_mock()
        result = compiled(left)
        assert with_onednn.call_count == (count if held_back else 0)
        error = (result - model(left)).norm() / result.norm()
        assert error < (1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("vendor", "capability", "libraries", "expected"),
    [
        ("AuthenticAMD", "AVX512", {"mkl", "mkldnn"}, True),
        ("HygonGenuine", "AVX512", {"mkl", "mkldnn"}, True),
        ("AuthenticAMD", "AVX512", {"mkl"}, False),
        ("AuthenticAMD", "AVX512", {"mkldnn"}, False),
        ("GenuineIntel", "AVX512", {"mkl", "mkldnn"}, False),
        ("AuthenticAMD", "AVX2", {"mkl", "mkldnn"}, False),
        (None, "AVX512", {"mkl", "mkldnn"}, False),
    ],
)
def test_where_mkl_is_held_back(
    vendor: str | None, capability: str, libraries: set[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: "mkl" in libraries)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: "mkldnn" in libraries)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(cpu_gemms, "cpu_info", lambda field: vendor)
    assert cpu_gemms.is_mkl_held_back.__wrapped__() is expected


def test_what_is_known_of_the_cpu() -> None:
    assert cpu_info("no such field") is None
    assert cpu_info("processor") in ("0", None)

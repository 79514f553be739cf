"""Kernels compiled for real GPUs. No GPU is needed, and nothing here measures speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.kernels.gpu_code import GpuCode
from tests.helpers.models.expert_segments import ACTIVATIONS, FORMS

CAPABILITIES = (80, 90, 100)
# The instruction that multiplies tiles of two-byte elements, where a tile has enough rows for the architecture's own.
TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
LEAST_ROWS = {80: 16, 90: 64, 100: 64}
# Per multiprocessor, and per block: the compute capabilities' limits, from NVIDIA's CUDA C++ programming guide.
REGISTERS = 65536
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}

# Bytes of a thread, once per tile, with biases: smaller tiles spill nothing, but are slower on an H100.
MOST_SPILLED_BYTES = {90: 128, 100: 32}


@pytest.mark.parametrize(
    ("registers", "shared", "tensor_memory", "blocks"),
    [(255, 147456, 0, 1), (124, 55296, 0, 4), (32, 0, 0, 16), (168, 73728, 256, 2), (128, 240 << 10, 0, 0)],
)
def test_blocks_that_fit_on_a_multiprocessor(registers: int, shared: int, tensor_memory: int, blocks: int) -> None:
    code = GpuCode(registers, 0, shared, 128, tensor_memory, {})
    assert code.blocks_per_processor(90) == blocks


def test_the_newest_tensor_core_instructions_are_named() -> None:
    code = GpuCode(32, 0, 0, 128, 0, {"HMMA.16816.F32": 2, "HGMMA.64x8": 3, "HGMMA.64x16": 1, "FFMA": 9})
    assert code.tensor_core_instructions() == ("HGMMA.64x8", 4)
    assert GpuCode(32, 0, 0, 128, 0, {"FFMA": 9}).tensor_core_instructions() == ("none", 0)


def _compiled(
    activation: str,
    form: str,
    dtype: str,
    *capabilities: int,
    turned: bool = False,
    tiles: str = "all",
    geometry: str = "qwen3-30b-a3b",
    in_fp8: bool = False,
) -> list[dict[str, Any]]:
    request = {"activation": activation, "form": form, "dtype": dtype, "capabilities": capabilities}
    words = [
        sys.executable,
        "-m",
        "tests.helpers.kernels.static_kernels",
        json.dumps({**request, "turned": turned, "tiles": tiles, "geometry": geometry, "in_fp8": in_fp8}),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes: list[dict[str, Any]] = json.loads(done.stdout)
    return codes


def _check(codes: list[dict[str, Any]], dtype: str) -> None:
    assert codes
    for code in codes:
        capability = code["capability"]
        if code["is_thin"]:
            continue  # products of low rank have no 16 contiguous bytes
        rows = code["tile"]["rows"]
        assert code["spilled_bytes"] <= (MOST_SPILLED_BYTES.get(capability, 0) if rows >= 64 else 0), code
        # At least one block fits, or two with few rows, because one does not fill a multiprocessor.
        blocks = 1 if rows >= 64 else 2
        assert code["registers_per_thread"] * code["threads"] * blocks <= REGISTERS
        assert code["shared_bytes"] * blocks <= SHARED_BYTES[capability]
        expected = TENSOR_CORES[capability] if rows >= LEAST_ROWS[capability] else "HMMA"
        products = [name for name in code["instructions"] if name.startswith(expected)]
        assert bool(products) == (dtype != "float32"), code
        # Weights and rows reach shared memory without passing through registers, as tiles or 16 bytes at a time.
        copies = "UTMALDG.2D" if code["tile"]["descriptors"] else "LDGSTS.E.BYPASS.128"
        assert code["instructions"].get(copies, 0) > 0, code


@pytest.fixture(scope="module")
def largest_tiles() -> list[dict[str, Any]]:
    """Compile the two kernels of SwiGLU experts at their largest tiles for all architectures, in one process."""
    return _compiled("swiglu", "returned", "bfloat16", *CAPABILITIES, tiles="largest")


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nothing_spills_and_tensor_cores_multiply(largest_tiles: list[dict[str, Any]], capability: int) -> None:
    codes = [code for code in largest_tiles if code["capability"] == capability]
    assert len(codes) == 2
    _check(codes, "bfloat16")


# The activation stands between the GEMMs, the rest of a form before and after them.
@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_row_work(activation: str, form: str, capability: int) -> None:
    _check(_compiled(activation, form, "bfloat16", capability), "bfloat16")


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", ["returned", "biases, returned", "low rank"])
@pytest.mark.parametrize("activation", ["swiglu", "clamped, interleaved"])
def test_all_types_and_layouts(activation: str, form: str, turned: bool, dtype: str) -> None:
    _check(_compiled(activation, form, dtype, *CAPABILITIES, turned=turned), dtype)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("activation", "form"), [("swiglu", "returned"), ("clamped, interleaved", "biases, returned"), ("geglu", "plain")]
)
def test_all_candidates_of_a_tuner(activation: str, form: str, dtype: str, capability: int) -> None:
    _check(_compiled(activation, form, dtype, capability, tiles="candidates"), dtype)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_candidates_for_few_rows_and_an_odd_width() -> None:
    """Without a limit of registers the compiler would spill here, to run more tiles at a time."""
    _check(
        _compiled(
            "clamped, interleaved", "biases, returned", "bfloat16", 90, tiles="few rows", geometry="gpt-oss-120b"
        ),
        "bfloat16",
    )


# Instructions that multiply tiles of FP8.
FP8_TENSOR_CORES = {90: "QGMMA", 100: "UTCQMMA"}


@pytest.mark.slow
@pytest.mark.parametrize(("geometry", "form"), [("qwen3-30b-a3b", "returned"), ("gpt-oss-120b", "biases")])
def test_experts_in_fp8(geometry: str, form: str) -> None:
    codes = _compiled("swiglu", form, "bfloat16", *FP8_TENSOR_CORES, tiles="candidates", geometry=geometry, in_fp8=True)
    assert {code["capability"] for code in codes} == set(FP8_TENSOR_CORES)
    for code in codes:
        rows = code["tile"]["rows"]
        assert code["spilled_bytes"] == 0, code
        assert code["shared_bytes"] <= SHARED_BYTES[code["capability"]]
        expected = FP8_TENSOR_CORES[code["capability"]] if rows >= 64 else "HMMA"
        assert any(name.startswith(expected) for name in code["instructions"]), code

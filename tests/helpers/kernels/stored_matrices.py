"""Random quantised matrices in every way in which published layouts pack them, and a check of their decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from hypothesis import strategies as st
from msgspec import structs

from moepass.models.layouts.layout import MatrixFormula, Number, Packing, Role

ALONG, ACROSS = Packing(4, 8), Packing(4, 8, dim=-2)
INTERLEAVED = Packing(4, 8, transposed=True, order=(0, 4, 1, 5, 2, 6, 3, 7))
# The packing of values and of zero points, for each way of packing that a published layout has.
INTEGERS: dict[str, tuple[Packing, Packing | None]] = {
    "words": (ALONG, None),
    "words with zero points": (ALONG, ACROSS),
    "bytes": (Packing(8, 4), None),
    "gptq": (Packing(4, 8, dim=-2, transposed=True), Packing(4, 8, transposed=True)),
    "gptq, 8 bits": (Packing(8, 4, dim=-2, transposed=True), Packing(8, 4, transposed=True)),
    "awq": (INTERLEAVED, INTERLEAVED),
}
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def _random(draw: st.DrawFn, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@st.composite
def stored_matrices(draw: st.DrawFn) -> tuple[MatrixFormula, dict[Role, torch.Tensor]]:
    """Draw a formula, and stored tensors of matrices with random codes and scales."""
    number = draw(st.sampled_from(Number))
    experts, rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 6)) * 8, draw(st.integers(1, 6)) * 8
    block = draw(st.sampled_from([(None, None), (1, None), (1, 8), (1, 16), (5, 16), (128, 128)]))
    if number is Number.E4M3:
        formula = MatrixFormula(Packing(8), number, block)
        values = _random(draw, experts, rows, columns, dtype=torch.float8_e4m3fn)
    elif number is Number.E2M1:
        formula = MatrixFormula(Packing(4, 2), number, block)
        values = _random(draw, experts, rows, columns // 2, dtype=torch.uint8)
    else:
        packing, zero_points = INTEGERS[draw(st.sampled_from(list(INTEGERS)))]
        offset = draw(st.sampled_from([0, 1]))
        block = (1, block[1])
        formula = MatrixFormula(packing, number, block, False, False, zero_points, 8 * (not zero_points), offset)
        shape = [columns, rows] if packing.transposed else [rows, columns]
        shape[packing.dim] //= packing.count
        values = _random(draw, experts, *shape, dtype=torch.int32)
    stored = {Role.VALUES: values}
    blocks = formula.block_counts(rows, columns)
    turned = blocks[::-1] if formula.packing.transposed else blocks
    scale_dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.float8_e4m3fn]
    scale_dtype = draw(st.sampled_from(scale_dtypes))
    scales = torch.rand(experts, *turned, generator=torch.Generator().manual_seed(rows)).mul(0.1).to(scale_dtype)
    stored[Role.SCALES] = scales
    if draw(st.booleans()):
        stored[Role.GLOBAL_SCALE] = torch.linspace(0.3, 7, experts)
        formula = MatrixFormula(**{**structs.asdict(formula), "divides": draw(st.booleans())})
    if (zero_points := formula.zero_points) is not None:
        stored_rows = -(-blocks[0] // zero_points.count)
        shape = [blocks[1], stored_rows] if zero_points.transposed else [stored_rows, blocks[1]]
        stored[Role.ZERO_POINTS] = _random(draw, experts, *shape, dtype=torch.int32)
    if number is Number.INT and draw(st.booleans()):
        generator = torch.Generator().manual_seed(columns)
        stored[Role.BLOCK_INDICES] = torch.randint(0, blocks[1], (experts, columns), generator=generator).int()
    return MatrixFormula(**{**structs.asdict(formula), "is_transposed": draw(st.booleans())}), stored


def assert_bits_of_torch(
    decode: Callable[[MatrixFormula, Mapping[Role, torch.Tensor], torch.Tensor], None],
    case: tuple[MatrixFormula, dict[Role, torch.Tensor]],
    dtype: torch.dtype,
    is_part: bool,
) -> None:
    """Check that `decode` writes the bits of `MatrixFormula.decode`; with `is_part` into a part of larger matrices."""
    formula, stored = case
    expected = formula.decode(stored, dtype)
    shape = list(expected.shape)
    memory = torch.full(
        [shape[0], *(size + 8 * is_part for size in shape[1:])], -3.0, dtype=dtype, device=expected.device
    )
    target = memory[:, : shape[1], : shape[2]]
    decode(formula, stored, target)
    assert torch.equal(target.isnan(), expected.isnan())
    assert torch.equal(target.nan_to_num(), expected.nan_to_num())
    assert torch.equal(target.signbit() & ~target.isnan(), expected.signbit() & ~expected.isnan())
    # Nothing is written beside the target.
    memory[:, : shape[1], : shape[2]] = -3
    assert (memory == -3).all()


def every_code() -> list[tuple[MatrixFormula, dict[Role, torch.Tensor]]]:
    """Return matrices with all codes of the types that are no integers."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    layouts = {Number.E4M3: (Packing(8), codes.view(torch.float8_e4m3fn)), Number.E2M1: (Packing(4, 2), codes)}
    return [
        (MatrixFormula(packing, number, (None, None)), {Role.VALUES: values, Role.SCALES: torch.ones(1)})
        for number, (packing, values) in layouts.items()
    ]

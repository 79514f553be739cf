"""Matrices in FP8 with a scale for each block of 128 x 128, and their values in float64."""

from __future__ import annotations

import itertools

import torch

from moepass.runtime.kernels.fp8_rows import LARGEST_E4M3, BlockScaledWeights

BLOCK = 128


def _spread(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the scale of each element of matrices [..., rows, columns]."""
    return scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :rows, :columns]


def in_blocks(weights: torch.Tensor) -> BlockScaledWeights:
    """Return `weights` [experts, out, in] in FP8, with a scale for each block."""
    rows, columns = weights.shape[-2:]
    padded = torch.nn.functional.pad(weights.double(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scales = (blocks.abs().amax((-3, -1)) / LARGEST_E4M3).float()
    values = (weights.double() / _spread(scales, rows, columns).double()).to(torch.float8_e4m3fn)
    return BlockScaledWeights(values, scales)


def exact(weights: BlockScaledWeights) -> torch.Tensor:
    return weights.values.double() * _spread(weights.scales, *weights.values.shape[-2:]).double()


def exact_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows` [n, width] as they are after quantisation, in float64."""
    width = rows.shape[1]
    blocks = torch.nn.functional.pad(rows.float(), (0, -width % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST_E4M3).clamp(min=2.0**-126)
    return ((blocks / scales).to(torch.float8_e4m3fn).double() * scales.double()).flatten(1)[:, :width]


def by_expert(rows: torch.Tensor, weights: BlockScaledWeights, ends: torch.Tensor) -> torch.Tensor:
    """Return `rows` in FP8 times the `weights` [experts, out, in] of their experts, in float64."""
    held, starts = exact_rows(rows), [0, *ends.tolist()]
    products = [
        held[begin:end] @ exact(weights)[expert].T for expert, (begin, end) in enumerate(itertools.pairwise(starts))
    ]
    return torch.cat(products)

"""Bytes of a fake tensor, in the graph's sizes."""

from __future__ import annotations

import math

import sympy
import torch

from moepass.passes.graph.input_sizes import size_expression


def elements(value: torch.Tensor) -> sympy.Expr:
    """Return the number of elements."""
    return sympy.Mul(*(size_expression(size) for size in value.shape))


def tensor_bytes(value: torch.Tensor) -> sympy.Expr:
    """Return the bytes of a tensor that is not a view."""
    if all(isinstance(size, int) for size in value.shape):
        return sympy.Integer(math.prod(value.shape) * value.itemsize)
    return elements(value) * value.itemsize


def row_bytes(value: torch.Tensor) -> sympy.Expr:
    """Return the bytes of one row of a tensor."""
    return sympy.Mul(*(size_expression(size) for size in value.shape[1:])) * value.itemsize

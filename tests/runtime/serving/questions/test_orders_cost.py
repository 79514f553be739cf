"""Documented FLOPs of a choice that is asked in several orders of its options."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moepass.models.sizes.presets import preset
from moepass.runtime.serving.batching.step_flops import FlopsTable, request_cost
from moepass.runtime.serving.questions.request_tree import RequestTree

# Tokens of the question, of each option, and of the text behind the options.
QUESTION, OPTION, CLOSING = 20, 8, 20
OPTIONS = 4
TABLE = FlopsTable(preset("qwen3-30b-a3b"))


def flops(input_tokens: int, orders: int) -> int:
    """Return the FLOPs of one request that asks in `orders` rotations of the options."""
    shared = np.arange(input_tokens + QUESTION)
    options = 100_000 + np.arange(OPTIONS * OPTION).reshape(OPTIONS, OPTION)
    tree = RequestTree(1 << 20)
    for number in range(orders):
        order = np.roll(options, number * OPTIONS // orders, axis=0).ravel()
        tree.read(tree.add(np.concatenate([shared, order, np.arange(CLOSING)])), 0, [1])
    return request_cost(tree.request("a"), TABLE, bytes(32)).flops


def table() -> str:
    """Return the table of docs/api.md."""
    lines = ["| tokens of the input | 2 orders | 4 orders |", "| --- | --- | --- |"]
    for tokens in (64, 512, 4096):
        ratios = [flops(tokens, orders) / flops(tokens, 1) for orders in (2, 4)]
        lines.append(f"| {tokens:,} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return "\n".join(lines)


def test_the_documentation_contains_the_cost_of_orders() -> None:
    page = Path(__file__).resolve().parents[4] / "docs" / "api.md"
    assert table() in page.read_text(encoding="utf-8"), table()

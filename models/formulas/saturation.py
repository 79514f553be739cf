"""The saturation threshold: the smallest number of tokens per rank and step whose computation hides a transfer.

    compute(n) ÷ F  >=  γ · t        F reached or peak rate, t the transfer's seconds, γ the margin (1.2)

compute(n) depends on the lengths of sequences, because attention scores grow with the length of a sequence and not with
the number of sequences. Both cases are solved with SymPy:

    sequences      of a fixed length: more tokens are more sequences, so scores cost a constant per token, and
                   n = γ·t·F / (f + scores per token). Exact for every kind of attention.
    one sequence   that gets longer: n·f + a·n(n + 1)/2 = γ·t·F, a quadratic equation in n. Beyond a window of w
                   tokens scores grow by w per token, and the equation is linear.

If no length is known, scores are ignored. The threshold is then too high, never too low.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import sympy

from moepass.models.errors import InputError
from moepass.models.formulas.attention import attention_flops, causal_pairs, score_flops
from moepass.models.formulas.layers import flops_per_token, layer_flops
from moepass.models.formulas.sizes import Size, evaluate, tokens
from moepass.models.sizes.architecture import Layer

GAMMA = 1.2

_symbols = sympy.symbols(
    "flops_per_token score_flops_per_token score_flops_per_pair flops_per_s transfer_seconds gamma", positive=True
)
_flops_per_token, _scores_per_token, _scores_per_pair, _flops_per_s, _transfer_seconds, _gamma = _symbols
_window = sympy.Symbol("window", positive=True, integer=True)


@dataclasses.dataclass(frozen=True)
class Saturation:
    """A solved threshold, in tokens and FLOPs per rank and step.

    Attributes:
        formula: the solution as text
        values: the values of its symbols
        expression: the solution as a SymPy expression
    """

    tokens: int
    flops: float
    formula: str
    values: dict[str, float]
    expression: Size = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=1)
def threshold_of_sequences() -> Size:
    """Return n for sequences of one length, in the symbols of this module."""
    (solution,) = sympy.solve(
        sympy.Eq(tokens * (_flops_per_token + _scores_per_token) / _flops_per_s, _hidden()), tokens
    )
    return solution


@functools.lru_cache(maxsize=2)
def threshold_of_one_sequence(windowed: bool = False) -> Size:
    """Return n for one sequence, in the symbols of this module.

    A token sees all earlier tokens, or if `windowed` only the last `window` ones.
    """

    def solved(pairs: Size) -> Size:
        seconds = (tokens * _flops_per_token + _scores_per_pair * pairs) / _flops_per_s
        roots = sympy.solve(sympy.Eq(seconds, _hidden()), tokens)
        (solution,) = [root for root in roots if _is_positive(root)]
        return solution

    inside = solved(causal_pairs(tokens))
    if not windowed:
        return inside
    behind = solved(causal_pairs(_window) + (tokens - _window) * _window)
    return sympy.Piecewise((inside, inside <= _window), (behind, True))


def _hidden() -> Size:
    return _gamma * _transfer_seconds


def _is_positive(root: Size) -> bool:
    # One root of the quadratic equation is negative for all values, so any value distinguishes them.
    return bool(root.subs({symbol: 1 for symbol in root.free_symbols if symbol != _gamma}).subs(_gamma, 100) > 0)


def saturation(
    layer: Layer,
    hidden: int,
    *,
    transfer_seconds: float,
    flops_per_s: float,
    gamma: float = GAMMA,
    sequence: int | None = None,
    one_sequence: bool = False,
) -> Saturation:
    """Return the threshold of one layer whose computation hides a transfer of `transfer_seconds`.

    Args:
        layer: The layer that computes during the transfer.
        hidden: The model's width.
        transfer_seconds: Seconds of the transfer of one bank.
        flops_per_s: The reached or the peak rate.
        gamma: Required ratio of computation to transfer.
        sequence: Tokens of each sequence. Without it, and without `one_sequence`, attention scores are ignored.
        one_sequence: The tokens are those of one sequence.

    Raises:
        InputError: A rate or margin is not positive, a transfer is negative, both `sequence` and `one_sequence` are
            set, or one sequence has chunked attention, where n jumps from chunk to chunk.
    """
    for name, value in (("flops_per_s", flops_per_s), ("gamma", gamma)):
        if not (value > 0 and math.isfinite(value)):
            raise InputError.wrong(name, value, "a number above 0")
    if not (transfer_seconds >= 0 and math.isfinite(transfer_seconds)):
        raise InputError.wrong("transfer_seconds", transfer_seconds, "a number of at least 0")
    if sequence is not None and sequence < 1:
        raise InputError(f"sequence is {sequence}; a sequence has at least 1 token", name="sequence", value=sequence)
    if one_sequence and sequence is not None:
        raise InputError(
            f"one_sequence and sequence={sequence} exclude each other: give one of the two",
            name="sequence",
            value=sequence,
        )
    values = {
        "flops_per_token": float(flops_per_token(layer, hidden)),
        "flops_per_s": float(flops_per_s),
        "transfer_seconds": float(transfer_seconds),
        "gamma": float(gamma),
    }
    expression, scores = _one_sequence(layer) if one_sequence else _sequences(layer, sequence)
    values.update(scores)
    exact = evaluate(expression, **values)
    count = _smallest(layer, hidden, exact, gamma * transfer_seconds * flops_per_s, sequence, one_sequence)
    flops = _flops(layer, hidden, count, sequence, one_sequence)
    return Saturation(count, flops, f"tokens = {expression}", values, expression)


def _sequences(layer: Layer, sequence: int | None) -> tuple[Size, dict[str, float]]:
    return threshold_of_sequences(), {"score_flops_per_token": _scores_per_token_of(layer, sequence)}


def _one_sequence(layer: Layer) -> tuple[Size, dict[str, float]]:
    attention = layer.attention
    if attention.kind == "chunked":
        raise InputError(
            "one sequence has no threshold under chunked attention: give the length of sequences instead",
            name="kind",
            value=attention.kind,
        )
    if attention.kind not in ("full", "sliding"):
        return _sequences(layer, 1)
    per_pair = float(score_flops(1, attention.heads, attention.head_dim, attention.value_head_dim))
    scores = {"score_flops_per_pair": per_pair}
    if attention.window is None:
        return threshold_of_one_sequence(), scores
    return threshold_of_one_sequence(windowed=True), {**scores, "window": attention.window}


def _scores_per_token_of(layer: Layer, sequence: int | None) -> float:
    if sequence is None:
        # States cost the same per token for every length; scores of pairs are ignored.
        has_state = layer.attention.kind in ("linear", "state_space")
        return float(attention_flops(layer.attention, 1, 1)) if has_state else 0.0
    return float(attention_flops(layer.attention, 1, sequence)) / sequence


def _flops(layer: Layer, hidden: int, count: int, sequence: int | None, one_sequence: bool) -> float:
    if one_sequence:
        return float(layer_flops(layer, hidden, 1, count))
    return count * (flops_per_token(layer, hidden) + _scores_per_token_of(layer, sequence))


# Up to this number of tokens, floating-point arithmetic distinguishes successive numbers.
_EXACT_COUNTS = 1 << 44


def _smallest(layer: Layer, hidden: int, exact: float, needed: float, sequence: int | None, one_sequence: bool) -> int:
    """Return the smallest sufficient integer: next to an exact solution, floating-point rounding may be off by one."""
    count = math.ceil(exact)
    if count > _EXACT_COUNTS:
        return count
    while count > 0 and _flops(layer, hidden, count - 1, sequence, one_sequence) >= needed:
        count -= 1
    while _flops(layer, hidden, count, sequence, one_sequence) < needed:
        count += 1
    return count

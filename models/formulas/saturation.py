"""The saturation threshold: the smallest number of tokens per rank and step whose computation hides a transfer.

    compute(n) ÷ F  >=  γ · t        F reached or peak rate, t the transfer's seconds, γ the margin (1.2)

All sequences have one length: more tokens are more sequences, so attention scores cost a constant per token, and
n = γ·t·F / (f + scores per token), exactly, for every kind of attention.
"""

from __future__ import annotations

import dataclasses
import math

from moepass.models.errors import InputError
from moepass.models.formulas.attention import attention_flops
from moepass.models.formulas.layers import flops_per_token
from moepass.models.sizes.architecture import Layer

GAMMA = 1.2

_FORMULA = "tokens = flops_per_s*gamma*transfer_seconds/(flops_per_token + score_flops_per_token)"
# Up to this number of tokens, floating-point arithmetic distinguishes successive numbers.
_EXACT_COUNTS = 1 << 44


@dataclasses.dataclass(frozen=True)
class Saturation:
    """A threshold, in tokens and FLOPs per rank and step. `values` has the values of the symbols in `formula`."""

    tokens: int
    flops: float
    formula: str
    values: dict[str, float]


def saturation(
    layer: Layer, hidden: int, *, transfer_seconds: float, flops_per_s: float, sequence: int, gamma: float = GAMMA
) -> Saturation:
    """Return the threshold of one layer whose computation hides a transfer of `transfer_seconds`.

    `flops_per_s` is the reached or the peak rate, `sequence` the tokens of each sequence. Raises InputError if a rate
    or margin is not positive, a transfer is negative, or a sequence has no tokens.
    """
    for name, value in (("flops_per_s", flops_per_s), ("gamma", gamma)):
        if not (value > 0 and math.isfinite(value)):
            raise InputError.wrong(name, value, "a number above 0")
    if not (transfer_seconds >= 0 and math.isfinite(transfer_seconds)):
        raise InputError.wrong("transfer_seconds", transfer_seconds, "a number of at least 0")
    if sequence < 1:
        raise InputError(f"sequence is {sequence}; a sequence has at least 1 token", name="sequence", value=sequence)
    values = {
        "flops_per_token": float(flops_per_token(layer, hidden)),
        "flops_per_s": float(flops_per_s),
        "transfer_seconds": float(transfer_seconds),
        "gamma": float(gamma),
        "score_flops_per_token": float(attention_flops(layer.attention, 1, sequence)) / sequence,
    }
    of_token = values["flops_per_token"] + values["score_flops_per_token"]
    count = _smallest(of_token, gamma * transfer_seconds * flops_per_s)
    return Saturation(count, count * of_token, _FORMULA, values)


def _smallest(flops_of_token: float, needed: float) -> int:
    """Return the smallest sufficient integer: next to the exact quotient, rounding may be off by one."""
    count = math.ceil(needed / flops_of_token)
    if count > _EXACT_COUNTS:
        return count
    while count > 0 and (count - 1) * flops_of_token >= needed:
        count -= 1
    while count * flops_of_token < needed:
        count += 1
    return count

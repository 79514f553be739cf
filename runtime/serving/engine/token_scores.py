"""Log-probabilities and most likely tokens from logits, a few rows at a time.

Pseudo-code
    for groups of rows whose logits take a bounded number of bytes:
        compute logits in fp32 and their log-sum-exp
        read the log-probability of every requested token of these rows
        read the most likely tokens of the rows that request some
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from moepass.runtime.serving.batching.step_batch import Indices
from moepass.runtime.serving.requests.answer import Floats
from moepass.runtime.serving.requests.request import Tokens

# [Empirical] Limit of the bytes of logits in fp32 at a time. Larger groups of rows are not faster on a CPU.
LOGITS_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class WantedScores:
    """The `tokens` [p] whose log-probability is computed in `rows` [p], ascending.

    `top` [rows of the step] is the number of most likely tokens to return for each row.
    """

    rows: Indices
    tokens: Indices
    top: Indices


@dataclasses.dataclass(frozen=True, eq=False)
class TokenScores:
    """Log-probabilities [p] in the order of `WantedScores`, and the most likely tokens [rows of the step, most top]."""

    log_probabilities: Floats
    top_tokens: Tokens
    top_log_probabilities: Floats


@torch.no_grad()
def score_tokens(
    states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], vocabulary: int, wanted: WantedScores
) -> TokenScores:
    """Return the `wanted` scores of the rows `states` [rows, hidden]; `head` computes logits [rows, vocabulary]."""
    count, most_top = len(states), int(wanted.top.max(initial=0))
    scores = TokenScores(
        np.empty(len(wanted.rows), np.float32),
        np.full((count, most_top), -1, np.int32),
        np.full((count, most_top), -np.inf, np.float32),
    )
    rows_at_once = max(1, LOGITS_BYTES // (4 * vocabulary))
    for start in range(0, count, rows_at_once):
        end = min(count, start + rows_at_once)
        logits = head(states[start:end]).float()
        log_totals = logits.logsumexp(-1)
        first, last = np.searchsorted(wanted.rows, (start, end))
        if last > first:
            pairs = slice(first, last)
            rows = torch.from_numpy(wanted.rows[pairs] - start).to(states.device)
            tokens = torch.from_numpy(wanted.tokens[pairs]).to(states.device)
            scores.log_probabilities[pairs] = (logits[rows, tokens] - log_totals[rows]).cpu().numpy()
        top_rows = np.flatnonzero(wanted.top[start:end])
        if len(top_rows):
            most = int(wanted.top[start:end].max())
            chosen = torch.from_numpy(top_rows).to(states.device)
            best = logits[chosen].topk(most, dim=-1)
            scores.top_tokens[start + top_rows, :most] = best.indices.cpu().numpy()
            scores.top_log_probabilities[start + top_rows, :most] = (
                (best.values - log_totals[chosen, None]).cpu().numpy()
            )
    return scores

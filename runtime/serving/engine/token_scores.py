"""Log-probabilities and most likely tokens from logits, a few rows at a time.

Pseudo-code
    for groups of rows whose logits take a bounded number of bytes:
        compute logits in fp32 and their log-sum-exp
        read the log-probability of every requested token of these rows
        read the most likely tokens of the rows that request some
    the results stay on the device; one copy brings those of all groups to the host
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from moepass.runtime.serving.batching.step_batch import Indices
from moepass.runtime.serving.requests.answer import Floats
from moepass.runtime.serving.requests.request import Tokens

# [Empirical] Limit of the bytes of logits in fp32 at a time. Larger groups of rows are not faster on a CPU. On other
# devices, each group costs a few kernel launches; this limit was chosen, not measured.
LOGITS_BYTES = 64 << 20
LOGITS_BYTES_ELSEWHERE = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class WantedScores:
    """The `tokens` [p] whose log-probability is computed in `rows` [p], ascending.

    `top` [rows of the step] is the number of most likely tokens to return for each row.
    """

    rows: Indices
    tokens: Indices
    top: Indices

    @property
    def indices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors that `score_tokens` needs on the device: rows, tokens, and the rows with most likely tokens."""
        rows, tokens, top_rows = map(torch.from_numpy, (self.rows, self.tokens, np.flatnonzero(self.top)))
        return rows, tokens, top_rows


@dataclasses.dataclass(frozen=True, eq=False)
class TokenScores:
    """Log-probabilities [p] in the order of `WantedScores`, and the most likely tokens [rows of the step, most top]."""

    log_probabilities: Floats
    top_tokens: Tokens
    top_log_probabilities: Floats


class ScoresOnDevice(NamedTuple):
    """The scores of a step where they were computed. Each list has an entry per group of rows that has such scores.

    `top_rows` are the rows of the most likely tokens.
    """

    log_probabilities: list[torch.Tensor]
    top_rows: list[Indices]
    top_tokens: list[torch.Tensor]
    top_log_probabilities: list[torch.Tensor]


@torch.no_grad()
def score_tokens(
    states: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    wanted: WantedScores,
    indices: Sequence[torch.Tensor],
) -> ScoresOnDevice:
    """Return the `wanted` scores of the rows `states` [rows, hidden]; `head` computes logits [rows, vocabulary].

    `indices` are those of `wanted`, on the device of the states.
    """
    scores = ScoresOnDevice([], [], [], [])
    all_top_rows = np.flatnonzero(wanted.top)
    pair_rows, pair_tokens, top_rows = indices

    # The logits of a group are freed when the function returns, before those of the next group are computed.
    def score(start: int, end: int) -> None:
        pairs, tops = (slice(*np.searchsorted(rows, (start, end)).tolist()) for rows in (wanted.rows, all_top_rows))
        if pairs.start == pairs.stop and tops.start == tops.stop:
            return  # only vectors are read
        logits = head(states[start:end]).float()
        log_totals = logits.logsumexp(-1)
        if pairs.start < pairs.stop:
            rows = pair_rows[pairs] - start
            scores.log_probabilities.append(logits[rows, pair_tokens[pairs]] - log_totals[rows])
        if tops.start < tops.stop:
            rows = top_rows[tops] - start
            best = logits[rows].topk(int(wanted.top[start:end].max()), dim=-1)
            scores.top_rows.append(all_top_rows[tops])
            scores.top_tokens.append(best.indices)
            scores.top_log_probabilities.append(best.values - log_totals[rows, None])

    rows_at_once = logits_rows(vocabulary, states.device.type)
    for start in range(0, len(states), rows_at_once):
        score(start, min(len(states), start + rows_at_once))
    return scores


def logits_rows(vocabulary: int, device_type: str) -> int:
    """Return the number of rows whose logits are computed at a time."""
    return max(1, (LOGITS_BYTES if device_type == "cpu" else LOGITS_BYTES_ELSEWHERE) // (4 * vocabulary))


def logits_bytes(rows: int, vocabulary: int, device_type: str) -> int:
    """Return the bytes that the logits of `rows` rows take at once: in fp32, with a copy for their log-sum-exp."""
    return 2 * 4 * min(rows, logits_rows(vocabulary, device_type)) * vocabulary


def token_scores(scores: ScoresOnDevice, wanted: WantedScores) -> TokenScores:
    """Return `scores`, which were downloaded, as arrays."""
    shape = (len(wanted.top), int(wanted.top.max(initial=0)))
    groups = [tensor.numpy() for tensor in scores.log_probabilities]
    result = TokenScores(
        np.concatenate((np.empty(0, np.float32), *groups)),
        np.full(shape, -1, np.int32),
        np.full(shape, -np.inf, np.float32),
    )
    for rows, tokens, values in zip(scores.top_rows, scores.top_tokens, scores.top_log_probabilities, strict=True):
        most = tokens.shape[1]
        result.top_tokens[rows, :most] = tokens.numpy()
        result.top_log_probabilities[rows, :most] = values.numpy()
    return result

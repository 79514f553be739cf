"""Log-probabilities, ranks and most likely tokens from logits, a few rows at a time.

Pseudo-code
    for some rows of states, so many that their logits take a bounded number of bytes:
        logits in fp32; their log-sum-exp
        the log-probability of every token that is asked for in these rows; its rank where that is asked for
        the most likely tokens of the rows that ask for some
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from moepass.runtime.serving.batching.step_batch import Indices
from moepass.runtime.serving.requests.answer import Floats
from moepass.runtime.serving.requests.request import Tokens

# Bytes of the logits that exist at once, in fp32. [Empirical] Larger pieces are not faster on a CPU.
LOGITS_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class WantedScores:
    """What is read of the rows of a step.

    rows, tokens   [p] the row, and the token whose log-probability is read in it; ordered by row
    is_ranked      [p] whether its rank is read too
    top            [rows of the step] how many of the most likely tokens are read in each
    """

    rows: Indices
    tokens: Indices
    is_ranked: npt.NDArray[np.bool_]
    top: Indices


@dataclasses.dataclass(frozen=True, eq=False)
class TokenScores:
    """In the order of `WantedScores`: [p], [p] (0 where no rank is read), and twice [rows of the step, most top]."""

    log_probabilities: Floats
    ranks: Tokens
    top_tokens: Tokens
    top_log_probabilities: Floats


@torch.no_grad()
def score_tokens(
    states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], vocabulary: int, wanted: WantedScores
) -> TokenScores:
    """The scores that are `wanted` of the rows `states` [rows, hidden]; `head` makes logits [rows, vocabulary]."""
    count, most_top = len(states), int(wanted.top.max(initial=0))
    found = TokenScores(
        np.empty(len(wanted.rows), np.float32),
        np.zeros(len(wanted.rows), np.int32),
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
            own = logits[rows, tokens]
            found.log_probabilities[pairs] = (own - log_totals[rows]).cpu().numpy()
            ranked = np.flatnonzero(wanted.is_ranked[pairs])
            for some in range(0, len(ranked), rows_at_once):
                chosen = torch.from_numpy(ranked[some : some + rows_at_once]).to(states.device)
                better = (logits[rows[chosen]] > own[chosen, None]).sum(-1) + 1
                found.ranks[first + ranked[some : some + rows_at_once]] = better.cpu().numpy()
        asking = np.flatnonzero(wanted.top[start:end])
        if len(asking):
            most = int(wanted.top[start:end].max())
            chosen = torch.from_numpy(asking).to(states.device)
            best = logits[chosen].topk(most, dim=-1)
            found.top_tokens[start + asking, :most] = best.indices.cpu().numpy()
            found.top_log_probabilities[start + asking, :most] = (best.values - log_totals[chosen, None]).cpu().numpy()
    return found

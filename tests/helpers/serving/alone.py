"""The oracle of serving: every sequence of a request alone, by plain transformers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request
from tests.helpers.serving.piece_paths import piece_path


@torch.no_grad()
def check_answers(model: PreTrainedModel, requests: Sequence[Request], answers: Sequence[Answer], atol: float) -> None:
    """Every number of `answers` is that of the sequence alone, to `atol`."""
    for request, answer in zip(requests, answers, strict=True):
        assert answer.id == request.id
        assert len(answer.pieces) == len(request.pieces)
        for number, (piece, found) in enumerate(zip(request.pieces, answer.pieces, strict=True)):
            path = piece_path(request, number)
            sequence = np.concatenate([request.pieces[part].tokens for part in path])
            before = len(sequence) - len(piece.tokens)
            ids = torch.from_numpy(sequence.astype(np.int64))[None]
            expected = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1).numpy()
            for read, given in zip(piece.reads, found.reads, strict=True):
                row = expected[before + read.place]
                np.testing.assert_allclose(given.log_probabilities, row[read.tokens], rtol=atol, atol=atol)
                best = np.sort(row)[::-1][: read.top]
                np.testing.assert_allclose(given.top_log_probabilities, best, rtol=atol, atol=atol)
                np.testing.assert_allclose(row[given.top_tokens], best, rtol=atol, atol=atol)
            assert (found.scored is None) == (not piece.is_scored)
            if found.scored is not None:
                for place, token in enumerate(piece.tokens):
                    at = before + place - 1
                    if at < 0:
                        assert np.isnan(found.scored.log_probabilities[place])
                        assert found.scored.ranks[place] == 0
                        continue
                    row = expected[at]
                    np.testing.assert_allclose(found.scored.log_probabilities[place], row[token], rtol=atol, atol=atol)
                    rank = found.scored.ranks[place]
                    assert 1 + (row > row[token] + atol).sum() <= rank <= 1 + (row > row[token] - atol).sum()
                    best = np.sort(row)[::-1][: piece.scored_top]
                    np.testing.assert_allclose(found.scored.top_log_probabilities[place], best, rtol=atol, atol=atol)
            assert (found.vector is None) == (piece.vector is None)
            if found.vector is not None:
                states = model.base_model(input_ids=ids, use_cache=False)[0][0]
                wanted = states[-1] if piece.vector == "last" else states.mean(0)
                np.testing.assert_allclose(found.vector, wanted.float().numpy(), atol=10 * atol)

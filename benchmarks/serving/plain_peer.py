"""Run plain transformers as a peer process; see `peer_process`.

python plain_peer.py FOLDER THREADS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from moepass.models.checkpoint.load_model import load_model


@torch.inference_mode()
def answers_of(model: PreTrainedModel, prompts: list[list[int]], batch_size: int) -> tuple[list[int], list[float]]:
    """Return the most likely next token of each prompt, and its log-probability."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    tokens, values = [0] * len(prompts), [0.0] * len(prompts)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        lengths = torch.tensor([len(prompts[row]) for row in rows])
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompts[row]) for row in rows], batch_first=True)
        is_token = torch.arange(ids.shape[1]) < lengths[:, None]
        # Without a mask argument, attention is causal by a flag, which is faster.
        mask = None if bool(is_token.all()) else is_token.long()
        states = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        logits = model.get_output_embeddings()(states[torch.arange(len(rows)), lengths - 1])
        best = logits.float().log_softmax(-1).max(-1)
        for row, token, value in zip(rows, best.indices.tolist(), best.values.tolist(), strict=True):
            tokens[row], values[row] = token, value
    return tokens, values


def main() -> None:
    """Answer lines of JSON until the input is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(int(sys.argv[2]))
    model = load_model(Path(sys.argv[1]))
    model.set_experts_implementation("grouped_mm")
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        tokens, values = answers_of(model, asked["prompts"], asked["batch_size"])
        result = {"seconds": time.perf_counter() - started, "tokens": tokens, "log_probabilities": values}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()

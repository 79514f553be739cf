"""Measure how much a score depends on the requests in the same step, their order and the cache, in fp32 and in bf16.

    python -m benchmarks.serving.company

The embedded model scores its held-out texts; groups of texts share prefixes. The reference is each request alone in a
step, without a cache, in the same dtype. For comparison: the change in plain transformers when a text is padded into a
batch, and the change by bf16 itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

from benchmarks.serving.shared import print_table
from moepass.models.checkpoint.checkpoint_folders import load_prompt, load_tokenizer, resolve_model
from moepass.models.checkpoint.load_model import load_model
from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead

FOLDER = resolve_model("demo")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Numbers of texts that share a prefix, texts in a prefix, texts in a padded batch, requests in a small step.
GROUP, PREFIX_TEXTS, BATCH, STEP = 8, 3, 32, 16
CACHE_BYTES = 64 << 20
LARGEST_IN_FP32 = 1e-5

Scores = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def prompts(count: int) -> tuple[list[list[int]], np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
    """Return the token ids of `count` prompts, and of the labels."""
    tokenizer, prompt = load_tokenizer(FOLDER), load_prompt(FOLDER)
    lines = (FOLDER / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    ids: list[list[int]] = []
    for number, text in enumerate(texts[:count]):
        start = number // GROUP * PREFIX_TEXTS % (len(texts) - PREFIX_TEXTS)
        prefix = " ".join(texts[start : start + PREFIX_TEXTS])
        ids.append(tokenizer(prompt.render(f"{prefix} {text}"))["input_ids"])
    labels = np.array([tokenizer.convert_tokens_to_ids(label) for label in prompt.labels or ()], np.int32)
    return ids, labels


def engine_of(model: PreTrainedModel, cache_bytes: int) -> ModelEngine:
    """Return an engine for `model` on the CPU with a prefix cache of `cache_bytes`."""
    options = EngineOptions(None, torch.device("cpu"), cache_bytes=cache_bytes)
    return make_engine(model, options, None, bytes(32))


def in_steps(engine: ModelEngine, requests: Sequence[Request], size: int) -> Scores:
    """Return log-probabilities [requests, labels], computed in steps of `size`, in the order of request names."""
    scores: dict[int, Scores] = {}
    for start in range(0, len(requests), size):
        for answer in engine.step(requests[start : start + size]).answers:
            scores[int(answer.id)] = answer.pieces[0].reads[0].log_probabilities.astype(np.float64)
    return np.stack([scores[number] for number in sorted(scores)])


@torch.inference_mode()
def by_transformers(
    model: PreTrainedModel, ids: list[list[int]], labels: np.ndarray[tuple[int, ...], np.dtype[np.int32]], batch: int
) -> Scores:
    """Return the scores of plain transformers, in batches padded on the left."""
    rows: list[Scores] = []
    for start in range(0, len(ids), batch):
        some = ids[start : start + batch]
        longest = max(map(len, some))
        tokens = torch.tensor([[0] * (longest - len(ids)) + ids for ids in some])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in some])
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = model(tokens, attention_mask=mask, position_ids=positions, logits_to_keep=1).logits[:, -1]
        rows.append(logits.float().log_softmax(-1)[:, labels].double().numpy())
    return np.concatenate(rows)


def change_of(found: Scores, alone: Scores) -> Scores:
    """Return the changes of log-probabilities relative to their size, or absolute for those between -1 and 0."""
    change: Scores = np.abs(found - alone) / np.maximum(1, np.abs(alone))
    return change


def changes(found: Scores, alone: Scores) -> list[str]:
    """Return the largest and 99th percentile changes, the largest change of a probability, and changed labels."""
    change = change_of(found, alone)
    of_probability = np.abs(np.exp(found) - np.exp(alone)).max()
    differing = int((found.argmax(-1) != alone.argmax(-1)).sum())
    return [f"{change.max():.1e}", f"{np.quantile(change, 0.99):.1e}", f"{of_probability:.1e}", str(differing)]


def main(count: int = 512) -> None:
    """Score COUNT texts alone and in company."""
    ids, labels = prompts(count)
    read = [(TokenRead(len(tokens) - 1, labels),) for tokens in ids]
    requests = [
        Request(str(number), (TokenPiece(-1, np.array(tokens, np.int32), reads),))
        for number, (tokens, reads) in enumerate(zip(ids, read, strict=True))
    ]
    shuffled = random.Random(0).sample(requests, len(requests))
    rows: list[list[str]] = []
    references: dict[str, Scores] = {}
    worst_in_fp32 = 0.0
    for name, dtype in DTYPES.items():
        plain = load_model(FOLDER, dtype)
        bare, cached = (engine_of(load_model(FOLDER, dtype), size) for size in (0, CACHE_BYTES))
        alone = references[name] = in_steps(bare, requests, 1)
        schedules: dict[str, Callable[[], Scores]] = {
            "all in one step": lambda bare=bare: in_steps(bare, requests, count),
            f"steps of {STEP}, shuffled": lambda bare=bare: in_steps(bare, shuffled, STEP),
            "the same with a cold cache": lambda cached=cached: in_steps(cached, shuffled, STEP),
            "alone, with a warm cache": lambda cached=cached: in_steps(cached, requests, 1),
        }
        for schedule, run in schedules.items():
            scores = run()
            rows.append([name, schedule, *changes(scores, alone)])
            if name == "fp32":
                worst_in_fp32 = max(worst_in_fp32, float(change_of(scores, alone).max()))
        by_itself = by_transformers(plain, ids, labels, 1)
        rows.append(
            [
                name,
                f"transformers, padded batches of {BATCH}",
                *changes(by_transformers(plain, ids, labels, BATCH), by_itself),
            ]
        )
    rows.append(["bf16", "against fp32, both alone", *changes(references["bf16"], references["fp32"])])
    print_table(
        f"{count} texts, groups of {GROUP} with a shared prefix, {sum(map(len, ids)) / count:.0f} tokens each; "
        "against each text alone",
        ["dtype", "company", "log-probability: largest", "99 %", "probability: largest", "other best label"],
        rows,
        "Log-probabilities of all labels, as a part of their size; of those nearer to 0 than -1 the change itself.",
    )
    if worst_in_fp32 > LARGEST_IN_FP32:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

"""`moepass demo`: compare predictions, streamed and with plain PyTorch, then print one decision over HTTP."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import nn

from moepass.compilations import Compilation, record_compilations
from moepass.explaining.capture_model import explain_meta_model
from moepass.explaining.compiler_view import print_explanation
from moepass.models.checkpoint.checkpoint_folders import DEMO, load_prompt, load_tokenizer, meta_model, resolve_model
from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import InputError, MoepassError
from moepass.runtime.offload.offload import OffloadReport, offload_experts
from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine
from moepass.runtime.serving.offline.text_scorer import TextScorer
from moepass.runtime.serving.questions.labels import encode_labels, score_label_rows
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.stored_compile import StoredModule

HELDOUT_FILE = "heldout.jsonl"
BATCH_SIZE = 32
SLOTS = 2
# Each runner is timed this often, alternating, so that both see the same load of the machine. The shortest time counts.
ROUNDS = 2
_CHOICES = {"Which language is this?": ("German", "Dutch", "English"), "German or Danish?": ("German", "Danish")}
REQUEST = {
    "model": "demo",
    "input": "Bitte geben Sie eine gültige Adresse ein",
    "questions": [
        {"type": "choice", "instructions": question, "choices": [{"value": choice} for choice in choices]}
        for question, choices in _CHOICES.items()
    ],
}
_SECONDS = 60.0


class DemoError(MoepassError, RuntimeError):
    """The demo's server has answered with an error."""


class HeldOutText(msgspec.Struct, frozen=True):
    """A text that the demo model was not trained on, with its label."""

    text: str
    label: str
    name: str = "a held-out text"


# The probability of each label for each text, [texts, labels].
Probabilities = npt.NDArray[np.float64]


@dataclasses.dataclass
class ModelRunner:
    """A variant of the model, and its results: probabilities, and the shortest time of a pass over all texts."""

    name: str
    run: Callable[[list[HeldOutText]], Probabilities]
    expert_bytes: int
    probabilities: Probabilities = dataclasses.field(default_factory=lambda: np.empty((0, 0)))
    seconds: float = math.inf


def run_demo(texts: int | None = None, lower: str = "inductor") -> bool:
    """Print the comparison for the first `texts` held-out texts, or for all.

    Returns True if streamed experts predict the same for every text as plain PyTorch. Raises InputError if there are
    fewer held-out texts.
    """
    console, status = Console(), Console(stderr=True)
    folder = resolve_model(DEMO)
    held_out = read_held_out(texts)
    with status.status("planning ..."):
        explanation = explain_meta_model(meta_model(folder), BATCH_SIZE, 32, SLOTS, lower)
    print_explanation(console, explanation)

    labels = load_prompt(folder).labels
    plain = _plain_runner(labels)
    with status.status(f"compiling ({lower}) ..."), record_compilations() as compilations:
        started = time.perf_counter()
        # The engine compiles when it first runs the model, before any text is scored.
        streamed, report = _streamed_runner(labels, lower)
        streamed.run(held_out[: 2 * BATCH_SIZE])
        compile_seconds = time.perf_counter() - started
        plain.run(held_out[: 2 * BATCH_SIZE])
        with status.status(f"scoring {len(held_out)} texts, {ROUNDS} times each ..."):
            for runner in [streamed, plain] * ROUNDS:
                started = time.perf_counter()
                runner.probabilities = runner.run(held_out)
                runner.seconds = min(runner.seconds, time.perf_counter() - started)
    streamed.expert_bytes = report.store.device_bytes
    _print_outcomes(console, held_out, labels, [streamed, plain])
    same = _print_equality(console, streamed.probabilities, plain.probabilities)
    _print_sources(console, compilations, report, compile_seconds)
    return same


def read_held_out(count: int | None) -> list[HeldOutText]:
    """Return the first `count` held-out texts, or all for None. Raises InputError if there are fewer."""
    file = resolve_model(DEMO) / HELDOUT_FILE
    items = [msgspec.json.decode(line, type=HeldOutText) for line in file.read_bytes().splitlines()]
    if count is not None and count > len(items):
        text = f"texts is {count}, but there are only {len(items)} held-out texts"
        raise InputError(text, name="texts", value=count, expected=len(items))
    return items[:count]


def _plain_runner(labels: Sequence[str]) -> ModelRunner:
    folder = resolve_model(DEMO)
    model = load_model(folder)
    expert_bytes = sum(value.nbytes for name, value in model.named_parameters() if ".experts." in name)
    writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), model.config.max_position_embeddings)
    tokens = encode_labels(writer.encoder, writer.ask("x"), labels)
    first_tokens = torch.tensor([label[0] for label in tokens])

    @torch.inference_mode()
    def run(texts: list[HeldOutText]) -> Probabilities:
        """Score padded batches of texts of similar length, as a user would by hand. Each label is one token."""
        _, prompts = writer.encode_texts([item.text for item in texts], [item.name for item in texts])
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        scores = torch.empty(len(prompts), len(labels))
        for start in range(0, len(order), BATCH_SIZE):
            batch = order[start : start + BATCH_SIZE]
            rows = [torch.from_numpy(prompts[number]).long() for number in batch]
            ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            lengths = torch.tensor([len(row) for row in rows])
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
            scores[batch] = logits[torch.arange(len(batch)), lengths - 1].log_softmax(-1)[:, first_tokens]
        return score_label_rows(tokens, scores.double().numpy()).probabilities

    return ModelRunner("plain PyTorch, resident", run, expert_bytes)


def _streamed_runner(labels: Sequence[str], lower: str) -> tuple[ModelRunner, OffloadReport]:
    folder = resolve_model(DEMO)
    model = load_model(folder)
    report = offload_experts(model, slots=SLOTS)

    def compile_module(module: nn.Module) -> Any:
        return StoredModule(module, {"lower": lower}, DEMO)

    options = EngineOptions(None, torch.device("cpu"), cache_bytes=0, warms_up=False)
    engine = make_engine(model, options, compile_module, secrets.token_bytes(32))
    writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), engine.facts.max_sequence_tokens)
    scorer = TextScorer(engine, writer, labels)

    def run(texts: list[HeldOutText]) -> Probabilities:
        return np.concatenate([window.probabilities for window in scorer.windows(texts)])

    return ModelRunner(f"asyncep ({lower}), streamed", run, report.ring_bytes), report


def _print_outcomes(
    console: Console, held_out: list[HeldOutText], labels: Sequence[str], runners: list[ModelRunner]
) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{len(held_out)} held-out texts, {len(set(labels))} languages")
    for heading in ("accuracy", "expert memory", "per text"):
        table.add_column(heading, justify="right")
    for runner in runners:
        best = runner.probabilities.argmax(1).tolist()
        right = sum(labels[number] == item.label for number, item in zip(best, held_out, strict=True))
        table.add_row(
            runner.name,
            f"{right / len(held_out):.2%}",
            decimal(runner.expert_bytes),
            f"{1000 * runner.seconds / len(held_out):.2f} ms",
        )
    console.print(table)


def _print_equality(console: Console, ours: Probabilities, theirs: Probabilities) -> bool:
    different = int((ours.argmax(1) != theirs.argmax(1)).sum())
    furthest = float(np.abs(ours - theirs).max())
    verdict = "[bold red]PREDICTIONS DIFFER[/bold red]" if different else "[bold green]equal[/bold green]"
    console.print(
        f"{verdict}: {different} of {len(ours)} predictions differ; probabilities by at most {furthest:.1e}",
        highlight=False,
    )
    return different == 0


def _print_sources(
    console: Console, compilations: list[Compilation], report: OffloadReport, compile_seconds: float
) -> None:
    rings = {id(item.executor.ring): item.executor.ring for item in compilations if item.executor.ring is not None}
    copied = sum(ring.statistics.copied_bytes for ring in rings.values())
    waited = sum(ring.statistics.waited_seconds for ring in rings.values())
    graphs = "graph" if len(compilations) == 1 else "graphs"
    console.print(
        f"Loaded and compiled ({len(compilations)} {graphs}), including the first batches, in {compile_seconds:.0f} s. "
        f"{decimal(copied)} of experts were copied into the ring; computation waited {waited:.2f} s for them.",
        highlight=False,
    )
    console.print(
        f"Measured on this machine's CPU, {torch.get_num_threads()} thread(s), link {report.store.link}: "
        f"warm, alternating, the better of {ROUNDS} runs. Device and host share one memory here, so the figures show "
        "that streaming loses no accuracy, not how much a GPU gains. Everything is measured; nothing is emulated or "
        "predicted.",
        highlight=False,
        style="dim",
    )


# ---- One decision over HTTP ------------------------------------------------------------------------------------------


async def ask_decision(url: str) -> None:
    """Print a request, send it to the server at `url`, and print the answer. Raises DemoError."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"\nOne decision with two questions over HTTP: POST {url}/v1/decisions", style="bold")
    console.print(readable(REQUEST), markup=False)
    async with httpx.AsyncClient(base_url=url, timeout=_SECONDS, trust_env=False) as client:
        response = await client.post("/v1/decisions", json=REQUEST)
    if response.status_code != 200:
        text = f"the demo's server has answered with status {response.status_code}: {response.text[:500]}"
        raise DemoError(text, value=response.status_code)
    console.print("Its answer:", style="bold")
    console.print(readable(response.json()), markup=False)
    console.print(
        "To keep such a server running, use [bold]moepass serve demo[/bold]; README.md shows requests for it."
    )


def readable(value: dict[str, Any]) -> str:
    """Return `value` as JSON with one line for each field, and for each item of a list."""
    fields = []
    for name, field in value.items():
        if isinstance(field, list):
            items = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in field)
            fields.append(f"  {json.dumps(name)}: [\n{items}\n  ]")
        else:
            fields.append(f"  {json.dumps(name)}: {json.dumps(field, ensure_ascii=False)}")
    return "{\n" + ",\n".join(fields) + "\n}"

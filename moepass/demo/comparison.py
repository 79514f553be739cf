"""The first part of `moepass demo`: compare the predictions of the demo model, streamed and with plain PyTorch."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from moepass.compilations import Compilation, record_compilations
from moepass.explaining.capture_model import explain_checkpoint
from moepass.explaining.compiler_view import print_explanation
from moepass.models.checkpoint.checkpoint_folders import DEMO, load_model, load_prompt, load_tokenizer, resolve_model
from moepass.models.errors import InputError
from moepass.runtime.offload.offload import OffloadReport, offload_experts
from moepass.runtime.serving.engine.load_engine import EngineOptions, make_engine
from moepass.runtime.serving.offline.text_scorer import TextScorer
from moepass.runtime.serving.questions.labels import LabelTokens, encode_labels, score_label_rows
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.stored_compile import StoredModule

HELDOUT_FILE = "heldout.jsonl"
BATCH_SIZE = 32
SLOTS = 2
# Each runner is timed this often, alternating, so that both see the same load of the machine. The shortest time counts.
ROUNDS = 2


class HeldOutText(msgspec.Struct, frozen=True):
    """A text that the demo model was not trained on, with its label."""

    text: str
    label: str
    name: str = "a held-out text"


# The probability of each label for each text, [texts, labels].
Probabilities = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class ModelRunner:
    """A variant of the model that computes probabilities, and the bytes of its experts on the compute device."""

    name: str
    run: Callable[[list[HeldOutText]], Probabilities]
    expert_bytes: int


@dataclasses.dataclass(frozen=True)
class DemoOutcome:
    """The probabilities of all texts, and the shortest measured time of one pass over them in seconds."""

    probabilities: Probabilities
    seconds: float


def run_demo(texts: int | None = None, lower: str = "inductor") -> bool:
    """Print the comparison.

    Args:
        texts: the number of held-out texts to score, None for all.
        lower: how segments are compiled.

    Returns:
        Whether streamed experts predict the same for every text as plain PyTorch.

    Raises:
        InputError: if there are fewer held-out texts than `texts`.
    """
    console, status = Console(), Console(stderr=True)
    folder = resolve_model(DEMO)
    held_out = read_held_out(texts)
    with status.status("planning ..."):
        explanation = explain_checkpoint(folder, batch=BATCH_SIZE, seq=32, slots=SLOTS, lower=lower)
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
            outcomes = _alternating([streamed, plain], held_out)
    on_device = dataclasses.replace(streamed, expert_bytes=report.store.device_bytes)
    _print_outcomes(console, held_out, labels, on_device, plain, outcomes)
    same = _print_equality(console, *outcomes)
    _print_sources(console, compilations, report, compile_seconds)
    return same


def read_held_out(count: int | None) -> list[HeldOutText]:
    """Return the first `count` held-out texts, or all for None. Raises InputError if there are fewer."""
    file = resolve_model(DEMO) / HELDOUT_FILE
    items = [msgspec.json.decode(line, type=HeldOutText) for line in file.read_bytes().splitlines()]
    if count is not None and count > len(items):
        raise InputError(
            f"texts is {count}, but there are only {len(items)} held-out texts",
            name="texts",
            value=count,
            expected=len(items),
        )
    return items[:count]


def _plain_runner(labels: Sequence[str]) -> ModelRunner:
    folder = resolve_model(DEMO)
    model = load_model(folder)
    expert_bytes = sum(value.nbytes for name, value in model.named_parameters() if ".experts." in name)
    writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), model.config.max_position_embeddings)
    tokens = encode_labels(writer.encoder, writer.ask("x"), labels)

    def run(texts: list[HeldOutText]) -> Probabilities:
        return _plain_scores(model, writer, texts, tokens)

    return ModelRunner("plain PyTorch, resident", run, expert_bytes)


@torch.inference_mode()
def _plain_scores(
    model: PreTrainedModel, writer: PromptWriter, texts: list[HeldOutText], labels: Sequence[LabelTokens]
) -> Probabilities:
    """Score padded batches of texts of similar length, as a user would by hand. Each label is one token."""
    _, prompts = writer.encode_texts([item.text for item in texts], [item.name for item in texts])
    first_tokens = torch.tensor([label[0] for label in labels])
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
    return score_label_rows(labels, scores.double().numpy()).probabilities


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


def _alternating(runners: list[ModelRunner], held_out: list[HeldOutText]) -> list[DemoOutcome]:
    tables: list[Probabilities] = [np.empty((0, 0))] * len(runners)
    seconds = [float("inf") for _ in runners]
    for _ in range(ROUNDS):
        for number, runner in enumerate(runners):
            started = time.perf_counter()
            tables[number] = runner.run(held_out)
            seconds[number] = min(seconds[number], time.perf_counter() - started)
    return [DemoOutcome(table, least) for table, least in zip(tables, seconds, strict=True)]


def _print_outcomes(
    console: Console,
    held_out: list[HeldOutText],
    labels: Sequence[str],
    streamed: ModelRunner,
    plain: ModelRunner,
    outcomes: list[DemoOutcome],
) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{len(held_out)} held-out texts, {len(set(labels))} languages")
    for heading in ("accuracy", "expert memory", "per text"):
        table.add_column(heading, justify="right")
    for runner, outcome in zip((streamed, plain), outcomes, strict=True):
        best = outcome.probabilities.argmax(1).tolist()
        right = sum(labels[number] == item.label for number, item in zip(best, held_out, strict=True))
        table.add_row(
            runner.name,
            f"{right / len(held_out):.2%}",
            decimal(runner.expert_bytes),
            f"{1000 * outcome.seconds / len(held_out):.2f} ms",
        )
    console.print(table)


def _print_equality(console: Console, streamed: DemoOutcome, plain: DemoOutcome) -> bool:
    ours, theirs = streamed.probabilities, plain.probabilities
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

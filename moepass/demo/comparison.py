"""`moepass demo`: the embedded model with streamed experts against plain PyTorch, prediction by prediction."""

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
# Each way is timed this often, in turns, so that both see the same machine; the least time counts.
ROUNDS = 2


class HeldOutText(msgspec.Struct, frozen=True):
    text: str
    label: str
    name: str = "a held-out text"


# [texts, labels] the probabilities of the labels for each text.
Chances = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run the model, and the memory that its experts take on the compute device."""

    name: str
    run: Callable[[list[HeldOutText]], Chances]
    expert_bytes: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`seconds` is the least of the measured times of one pass over all texts."""

    probabilities: Chances
    seconds: float


def run_demo(texts: int | None = None, lower: str = "inductor") -> bool:
    """Print the comparison; True where every prediction with streamed experts is that of plain PyTorch.

    `texts` None takes all held-out texts. Raises InputError where more are asked for than there are.
    """
    console, status = Console(), Console(stderr=True)
    folder = resolve_model(DEMO)
    held_out = read_held_out(texts)
    with status.status("planning ..."):
        explanation = explain_checkpoint(folder, batch=BATCH_SIZE, seq=32, slots=SLOTS, lower=lower)
    print_explanation(console, explanation)

    labels = load_prompt(folder).labels
    plain = _plain_way(labels)
    with status.status(f"compiling ({lower}) ..."), record_compilations() as compilations:
        started = time.perf_counter()
        # An engine compiles what it tries its model with, before any text comes.
        streamed, report = _streamed_way(labels, lower)
        streamed.run(held_out[: 2 * BATCH_SIZE])
        compile_seconds = time.perf_counter() - started
        plain.run(held_out[: 2 * BATCH_SIZE])
        with status.status(f"scoring {len(held_out)} texts, {ROUNDS} times each way ..."):
            outcomes = _in_turns([streamed, plain], held_out)
    on_device = dataclasses.replace(streamed, expert_bytes=report.store.device_bytes)
    _print_outcomes(console, held_out, labels, on_device, plain, outcomes)
    same = _print_equality(console, *outcomes)
    _print_sources(console, compilations, report, compile_seconds)
    return same


def read_held_out(count: int | None) -> list[HeldOutText]:
    """The first `count` of the embedded held-out texts, None for all. Raises InputError where there are fewer."""
    file = resolve_model(DEMO) / HELDOUT_FILE
    items = [msgspec.json.decode(line, type=HeldOutText) for line in file.read_bytes().splitlines()]
    if count is not None and count > len(items):
        raise InputError(
            f"texts is {count}, but only {len(items)} held-out texts are embedded",
            name="texts",
            value=count,
            expected=len(items),
        )
    return items[:count]


def _plain_way(labels: Sequence[str]) -> Way:
    folder = resolve_model(DEMO)
    model = load_model(folder)
    expert_bytes = sum(value.nbytes for name, value in model.named_parameters() if ".experts." in name)
    writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), model.config.max_position_embeddings)
    tokens = encode_labels(writer.encoder, writer.ask("x"), labels)

    def run(texts: list[HeldOutText]) -> Chances:
        return _plain_scores(model, writer, texts, tokens)

    return Way("plain PyTorch, resident", run, expert_bytes)


@torch.inference_mode()
def _plain_scores(
    model: PreTrainedModel, writer: PromptWriter, texts: list[HeldOutText], labels: Sequence[LabelTokens]
) -> Chances:
    """Padded batches of texts of equal length, as one would write them by hand; each label is one token."""
    _, prompts = writer.encode_texts([item.text for item in texts], [item.name for item in texts])
    first_tokens = torch.tensor([label[0] for label in labels])
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    found = torch.empty(len(prompts), len(labels))
    for start in range(0, len(order), BATCH_SIZE):
        batch = order[start : start + BATCH_SIZE]
        rows = [torch.from_numpy(prompts[number]).long() for number in batch]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        found[batch] = logits[torch.arange(len(batch)), lengths - 1].log_softmax(-1)[:, first_tokens]
    return score_label_rows(labels, found.double().numpy()).probabilities


def _streamed_way(labels: Sequence[str], lower: str) -> tuple[Way, OffloadReport]:
    folder = resolve_model(DEMO)
    model = load_model(folder)
    report = offload_experts(model, slots=SLOTS)

    def compile_module(module: nn.Module) -> Any:
        return StoredModule(module, {"lower": lower}, DEMO)

    options = EngineOptions(None, torch.device("cpu"), cache_bytes=0, warms_up=False)
    engine = make_engine(model, options, compile_module, secrets.token_bytes(32))
    writer = PromptWriter(load_tokenizer(folder), load_prompt(folder), engine.facts.max_sequence_tokens)
    scorer = TextScorer(engine, writer, labels)

    def run(texts: list[HeldOutText]) -> Chances:
        return np.concatenate([window.probabilities for window in scorer.windows(texts)])

    return Way(f"asyncep ({lower}), streamed", run, report.ring_bytes), report


def _in_turns(ways: list[Way], held_out: list[HeldOutText]) -> list[Outcome]:
    found: list[Chances] = [np.empty((0, 0))] * len(ways)
    seconds = [float("inf") for _ in ways]
    for _ in range(ROUNDS):
        for number, way in enumerate(ways):
            started = time.perf_counter()
            found[number] = way.run(held_out)
            seconds[number] = min(seconds[number], time.perf_counter() - started)
    return [Outcome(table, least) for table, least in zip(found, seconds, strict=True)]


def _print_outcomes(
    console: Console,
    held_out: list[HeldOutText],
    labels: Sequence[str],
    streamed: Way,
    plain: Way,
    outcomes: list[Outcome],
) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{len(held_out)} held-out texts, {len(set(labels))} languages")
    for heading in ("accuracy", "expert memory", "per text"):
        table.add_column(heading, justify="right")
    for way, outcome in zip((streamed, plain), outcomes, strict=True):
        best = outcome.probabilities.argmax(1).tolist()
        right = sum(labels[number] == item.label for number, item in zip(best, held_out, strict=True))
        table.add_row(
            way.name,
            f"{right / len(held_out):.2%}",
            decimal(way.expert_bytes),
            f"{1000 * outcome.seconds / len(held_out):.2f} ms",
        )
    console.print(table)


def _print_equality(console: Console, streamed: Outcome, plain: Outcome) -> bool:
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
        f"Loaded and compiled ({len(compilations)} {graphs}), first batches included, in {compile_seconds:.0f} s. "
        f"{decimal(copied)} of experts went through the ring; computation waited {waited:.2f} s for them.",
        highlight=False,
    )
    console.print(
        f"Measured on this machine's CPU, {torch.get_num_threads()} thread(s), link {report.store.link}: "
        f"warm, in turns, the better of {ROUNDS} runs. Device and host are the same memory here, so the numbers show "
        "that nothing is lost, not what a GPU gains. Accuracy and memory are real; nothing is emulated or predicted.",
        highlight=False,
        style="dim",
    )

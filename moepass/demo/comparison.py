"""`moepass demo`: the embedded model with streamed experts against plain PyTorch, prediction by prediction."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from moepass.backend import Compilation, record_compilations
from moepass.explaining.capture_model import explain_model
from moepass.explaining.compiler_view import print_explanation
from moepass.models.checkpoint.checkpoint_folders import DEMO, load_model, load_prompt, load_tokenizer, resolve_model
from moepass.models.errors import InputError
from moepass.runtime.offload.offload import OffloadReport, offload_experts
from moepass.runtime.serving.scoring import LabelSet, Score, Scorer
from moepass.stored_compile import StoredModule

HELDOUT_FILE = "heldout.jsonl"
BATCH_SIZE = 32
SLOTS = 2
# Each way is timed this often, in turns, so that both see the same machine; the least time counts.
ROUNDS = 2


class HeldOutText(msgspec.Struct, frozen=True):
    text: str
    label: str


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run the model, and the memory that its experts take on the compute device."""

    name: str
    scorer: Scorer
    expert_bytes: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`seconds` is the least of the measured times of one pass over all texts."""

    scores: list[Score]
    seconds: float


def run_demo(texts: int | None = None, lower: str = "inductor") -> bool:
    """Print the comparison; True where every prediction with streamed experts is that of plain PyTorch.

    `texts` None takes all held-out texts. Raises InputError where more are asked for than there are.
    """
    console, status = Console(), Console(stderr=True)
    folder = resolve_model(DEMO)
    held_out = read_held_out(texts)
    with status.status("planning ..."):
        explanation = explain_model(folder, batch=BATCH_SIZE, seq=32, slots=SLOTS, lower=lower)
    print_explanation(console, explanation)

    plain = _plain_way()
    streamed, report = _streamed_way(lower)
    labels = plain.scorer.labels(plain.scorer.prompt.labels)
    prompts = [plain.scorer.encode(item.text, labels, f"text {n}") for n, item in enumerate(held_out, 1)]
    with status.status(f"compiling ({lower}) ..."), record_compilations() as compilations:
        started = time.perf_counter()
        _run(streamed, prompts[: 2 * BATCH_SIZE], labels)
        compile_seconds = time.perf_counter() - started
        _run(plain, prompts[: 2 * BATCH_SIZE], labels)
        with status.status(f"scoring {len(prompts)} texts, {ROUNDS} times each way ..."):
            outcomes = _in_turns([streamed, plain], prompts, labels)
    on_device = dataclasses.replace(streamed, expert_bytes=report.store.device_bytes)
    _print_outcomes(console, held_out, on_device, plain, outcomes)
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


def _plain_way() -> Way:
    folder = resolve_model(DEMO)
    model = load_model(folder)
    expert_bytes = sum(value.nbytes for name, value in model.named_parameters() if ".experts." in name)
    scorer = Scorer.of(model, load_tokenizer(folder), load_prompt(folder))
    return Way("plain PyTorch, resident", scorer, expert_bytes)


def _streamed_way(lower: str) -> tuple[Way, OffloadReport]:
    folder = resolve_model(DEMO)
    model = load_model(folder)
    report = offload_experts(model, slots=SLOTS)

    def compile_module(module: torch.nn.Module) -> Any:
        return StoredModule(module, {"lower": lower}, DEMO)

    scorer = Scorer.of(model, load_tokenizer(folder), load_prompt(folder), compile_module)
    return Way(f"asyncep ({lower}), streamed", scorer, report.ring_bytes), report


def _run(way: Way, prompts: list[tuple[int, ...]], labels: LabelSet) -> list[Score]:
    return list(way.scorer.score_prompts(prompts, labels, BATCH_SIZE))


def _in_turns(ways: list[Way], prompts: list[tuple[int, ...]], labels: LabelSet) -> list[Outcome]:
    scores: list[list[Score]] = [[] for _ in ways]
    seconds = [float("inf") for _ in ways]
    for _ in range(ROUNDS):
        for number, way in enumerate(ways):
            started = time.perf_counter()
            scores[number] = _run(way, prompts, labels)
            seconds[number] = min(seconds[number], time.perf_counter() - started)
    return [Outcome(found, least) for found, least in zip(scores, seconds, strict=True)]


def _print_outcomes(
    console: Console, held_out: list[HeldOutText], streamed: Way, plain: Way, outcomes: list[Outcome]
) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{len(held_out)} held-out texts, {len(set(plain.scorer.prompt.labels))} languages")
    for heading in ("accuracy", "expert memory", "per text"):
        table.add_column(heading, justify="right")
    for way, outcome in zip((streamed, plain), outcomes, strict=True):
        right = sum(score.label == item.label for score, item in zip(outcome.scores, held_out, strict=True))
        table.add_row(
            way.name,
            f"{right / len(held_out):.2%}",
            decimal(way.expert_bytes),
            f"{1000 * outcome.seconds / len(held_out):.2f} ms",
        )
    console.print(table)


def _print_equality(console: Console, streamed: Outcome, plain: Outcome) -> bool:
    pairs = list(zip(streamed.scores, plain.scores, strict=True))
    different = sum(ours.label != theirs.label for ours, theirs in pairs)
    furthest = max(
        abs(value - theirs.probabilities[label])
        for ours, theirs in pairs
        for label, value in ours.probabilities.items()
    )
    verdict = "[bold red]PREDICTIONS DIFFER[/bold red]" if different else "[bold green]equal[/bold green]"
    console.print(
        f"{verdict}: {different} of {len(pairs)} predictions differ; probabilities by at most {furthest:.1e}",
        highlight=False,
    )
    same: bool = different == 0
    return same


def _print_sources(
    console: Console, compilations: list[Compilation], report: OffloadReport, compile_seconds: float
) -> None:
    rings = {id(item.executor.ring): item.executor.ring for item in compilations if item.executor.ring is not None}
    copied = sum(ring.statistics.copied_bytes for ring in rings.values())
    waited = sum(ring.statistics.waited_seconds for ring in rings.values())
    console.print(
        f"Compiled {len(compilations)} graph(s), first batches included, in {compile_seconds:.0f} s. "
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

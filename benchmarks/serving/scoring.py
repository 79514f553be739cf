"""Compare `moepass score` with a hand-written loop over transformers: whole commands on many short lines."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import typer

from benchmarks.serving.shared import median_and_spread, print_table, verdict
from moepass.models.demo import demo_folder

LEAST_RATIO = 1.5
TOLERANCE = 1e-5
# The fraction of lines in which rounding may decide a near tie of two experts for a token.
MOST_BEYOND = 1e-3
BATCH_SIZES = (64, 128, 256, 512)

app = typer.Typer(add_completion=False)


@app.command()
def compare(lines: int = 20_000, repeats: int = 3, threads: int = 1, more: str = "") -> None:
    """Print a table of wall and processor seconds. MORE are further options of `moepass score`."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "texts.jsonl"
        texts = short_lines(lines)
        source.write_text("".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts))
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "cache"), "HF_HUB_OFFLINE": "1"}
        environment.pop("MOEPASS_CACHE_DIR", None)
        sizes = {size: _plain(source, size, threads, environment)[1] for size in BATCH_SIZES}
        best = min(sizes, key=sizes.__getitem__)
        runs = {
            "moepass score": lambda: _moepass(source, threads, more.split(), environment),
            f"transformers, batches of {best}": lambda: _plain(source, best, threads, environment),
        }
        ours, theirs = (run()[2] for run in runs.values())  # warm: files, captures
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                seconds[name].append(run()[:2])
        differ, beyond, furthest, most_within = _difference(ours, theirs)
    rows = [
        [name, *(median_and_spread([pair[index] for pair in measurements]) for index in (0, 1))]
        for name, measurements in seconds.items()
    ]
    mine, plain = seconds.values()
    ratios = [
        [plain_times[index] / our_times[index] for our_times, plain_times in zip(mine, plain, strict=True)]
        for index in (0, 1)
    ]
    holds = statistics.median(ratios[0]) >= LEAST_RATIO and not differ and beyond <= MOST_BEYOND * lines
    print_table(
        f"{lines} short lines, the demo model, {threads} thread(s): seconds of the whole command",
        ["command", "wall", "processors"],
        rows,
        f"times as fast: {median_and_spread(ratios[0])} by wall time, {median_and_spread(ratios[1])} by processor "
        f"time. {differ} labels differ. Probabilities of {beyond} lines differ by more than {TOLERANCE:g}, at most by "
        f"{furthest:.1e}; those of all other lines by at most {most_within:.1e}. At least {LEAST_RATIO} and equal to "
        f"{TOLERANCE:g}: {verdict(holds)}",
    )
    if not holds:
        raise typer.Exit(1)


@app.command(hidden=True)
def plain(source: Path, target: Path, batch_size: int, threads: int) -> None:
    """Score by a loop with plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    folder = demo_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False).eval()
    prompt = json.loads((folder / "prompt.json").read_text())
    labels = prompt["labels"]
    label_tokens = torch.tensor([tokenizer(label, add_special_tokens=False)["input_ids"][0] for label in labels])
    separator = tokenizer("<sep>", add_special_tokens=False)["input_ids"]
    records = [json.loads(line) for line in source.read_text().splitlines()]
    cut = {"truncation": True, "max_length": prompt["max_text_tokens"], "add_special_tokens": False}
    encoded = [ids + separator for ids in tokenizer([record["text"] for record in records], **cut)["input_ids"]]
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number]))
    scores: list[Any] = [None] * len(encoded)
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            rows = [encoded[number] for number in batch]
            width = len(rows[-1])
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1
            ).logits[:, -1]
            log_probabilities = logits.log_softmax(-1)[:, label_tokens]
            chances, masses = log_probabilities.softmax(-1).tolist(), log_probabilities.exp().sum(-1).tolist()
            for number, row, mass in zip(batch, chances, masses, strict=True):
                scores[number] = (row, mass)
    with target.open("w") as sink:
        for record, (row, mass) in zip(records, scores, strict=True):
            best = labels[max(range(len(row)), key=row.__getitem__)]
            answer = {"label": best, "probabilities": dict(zip(labels, row, strict=True)), "mass": mass}
            sink.write(json.dumps({**answer, "input_label": record["label"]}) + "\n")


def short_lines(count: int) -> list[dict[str, str]]:
    """Return the held-out texts of the demo, and then excerpts of them, without duplicates."""
    held_out = [json.loads(line) for line in (demo_folder() / "heldout.jsonl").read_text().splitlines()]
    generator = random.Random(0)
    labels = {item["text"]: item["label"] for item in held_out}
    while len(labels) < count:
        item = generator.choice(held_out)
        words = item["text"].split()
        first = generator.randrange(len(words))
        labels.setdefault(" ".join(words[first : generator.randrange(first, len(words)) + 1]), item["label"])
        if len(words) < 3:  # scripts without spaces
            first = generator.randrange(len(item["text"]))
            excerpt = item["text"][first : generator.randrange(first, len(item["text"])) + 1].strip()
            labels.update({excerpt: item["label"]} if excerpt else {})
    items = list(labels.items())[:count]
    generator.shuffle(items)
    return [{"text": text, "label": label} for text, label in items]


def _moepass(source: Path, threads: int, more: list[str], environment: dict[str, str]) -> tuple[float, float, Path]:
    target = source.parent / "ours.jsonl"
    files = ["--input", str(source), "--output", str(target)]
    words = ["-m", "moepass.cli", "score", "demo", "--threads", str(threads), *files, *more]
    return *_timed(words, environment), target


def _plain(source: Path, batch_size: int, threads: int, environment: dict[str, str]) -> tuple[float, float, Path]:
    target = source.parent / "plain.jsonl"
    words = ["-m", "benchmarks.serving.scoring", "plain", str(source), str(target), str(batch_size), str(threads)]
    return *_timed(words, environment), target


def _timed(words: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return wall seconds and processor seconds of a process."""
    before, started = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, env=environment, capture_output=True)
    seconds, after = time.perf_counter() - started, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, used


def _difference(ours: Path, theirs: Path) -> tuple[int, int, float, float]:
    """Compare two files of scores.

    Returns:
        The number of differing labels, the number of lines with a probability that differs by more than TOLERANCE, the
        largest difference of a probability, and the largest one in the remaining lines.
    """
    differ, changes = 0, []
    with ours.open() as left, theirs.open() as right:
        for mine, plain in zip(map(json.loads, left), map(json.loads, right), strict=True):
            differ += mine["label"] != plain["label"]
            pairs = ((value, plain["probabilities"][label]) for label, value in mine["probabilities"].items())
            changes.append(max(abs(value - wanted) for value, wanted in pairs))
    within = [change for change in changes if change <= TOLERANCE]
    return differ, len(changes) - len(within), max(changes), max(within)


if __name__ == "__main__":
    app()

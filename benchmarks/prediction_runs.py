"""Runs that `prediction.py` compares with forecasts: streamed models on emulated links, alone and on two ranks."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import reference_model
from emulated_exchange import DelayedExperts
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

import moepass
from moepass.models.expert_parallel import AllToAllExperts
from moepass.models.expert_placement import ExpertPlacement

RANKS = 2
_CAUSAL = "causal"
CROSSOVER_LAYERS = 2
CROSSOVER_TOKENS = (256, 512, 768, 1024, 2048)
_STEADY_STEPS = 3


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
        """Cases that differ in their tokens alone are one model."""
        return self.home, self.layers, self.slots, self.link_bytes_per_s


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds of every timed step, those of the slowest rank, and whether outputs were those of the plain model."""

    case: Case
    seconds: list[float]
    is_equal: bool


@dataclasses.dataclass(frozen=True)
class BothForms:
    """Seconds of a step with that many tokens per rank: tokens exchanged by AllToAll, and experts gathered."""

    tokens: int
    exchanged_seconds: float
    gathered_seconds: float


def causal_attention() -> None:
    """Attention by the kernel's own flag: under torch 2.13 transformers gives compiled models a mask instead."""

    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
        grouped = key.shape[1] != query.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return mixed.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_CAUSAL, attend)
    AttentionMaskInterface.register(_CAUSAL, lambda *_, **__: None)


def measure_alone(cases: Sequence[Case], sequence: int, repeats: int) -> Iterator[Measured]:
    """In this process, on one thread; copies have the rest of the machine. `cases` are of one model."""
    torch.set_num_threads(1)
    with torch.no_grad():
        yield from _measure_model(cases, sequence, repeats, _seconds_alone)


def measure_on_ranks(cases: Sequence[Case], sequence: int, repeats: int) -> list[Measured]:
    """On two ranks, each pinned to a core; `cases` are of one model."""
    measured: list[Measured] = _on_ranks(_measure_model, list(cases), sequence, repeats, _seconds_together)
    return measured


def measure_both_forms(link_bytes_per_s: float, sequence: int, repeats: int) -> list[BothForms]:
    """Both forms of a model on the same ranks."""
    measured: list[BothForms] = _on_ranks(_both_forms, link_bytes_per_s, sequence, repeats)
    return measured


def _on_ranks(function: Callable[..., Iterable[Any]], *arguments: Any) -> list[Any]:
    """What `function` gives on the first of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
        torch.multiprocessing.spawn(_rank, (store, queue, function, arguments), nprocs=RANKS)
        measured: list[Any] = queue.get()
    return measured


def _rank(
    rank: int, store: str, queue: Any, function: Callable[..., Iterable[Any]], arguments: tuple[Any, ...]
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    causal_attention()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    with torch.no_grad():
        measured = list(function(*arguments))
    if rank == 0:
        queue.put(measured)
    dist.destroy_process_group()


def _measure_model(
    cases: Sequence[Case], sequence: int, repeats: int, time_them: Callable[[Callable[[], object], int], list[float]]
) -> Iterator[Measured]:
    torch._dynamo.reset()
    gc.collect()
    case = cases[0]
    model = _model(case.layers)
    inputs = [_inputs(one.tokens, sequence) for one in cases]
    wanted = [model(**given).logits for given in inputs]
    link = f"emulate:{case.link_bytes_per_s}"
    more = {"host_link": link} if case.home == "hybrid" else {}
    moepass.offload_experts(model, home=case.home, slots=case.slots, link=link, **more)
    compiled = torch.compile(model, backend="asyncep", dynamic=True)
    for one, given, expected in zip(cases, inputs, wanted, strict=True):
        is_equal = torch.allclose(compiled(**given).logits, expected, rtol=1e-4, atol=1e-4)
        compiled(**given)
        yield Measured(one, time_them(lambda given=given: compiled(**given), repeats), is_equal)  # type: ignore[misc]


def _model(layers: int) -> PreTrainedModel:
    model = reference_model(layers)
    model.set_attn_implementation(_CAUSAL)
    return model


def _inputs(tokens: int, sequence: int) -> dict[str, Any]:
    """Texts of `sequence` random tokens, the same on all ranks; the logits of the last token of each are asked for."""
    texts = torch.randint(0, 1024, (tokens // sequence, sequence), generator=torch.Generator().manual_seed(tokens))
    return {"input_ids": texts, "use_cache": False, "logits_to_keep": 1}


def _seconds_alone(run: Callable[[], object], repeats: int) -> list[float]:
    """Of steps that follow each other, as the steady state has them."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds


def _seconds_together(run: Callable[[], object], repeats: int) -> list[float]:
    dist.barrier()
    return _slowest(_seconds_alone(run, repeats))


def _both_forms(rate: float, sequence: int, repeats: int) -> list[BothForms]:
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.reset()
    gc.collect()
    exchanging, gathering = _exchanging_model(DelayedExperts), _exchanging_model(AllToAllExperts)
    for module in exchanging.modules():
        if isinstance(module, DelayedExperts):
            module.bytes_per_s = rate
    forms = {
        # The exchange stays, and experts run on the same kernels as those that are gathered.
        "AllToAll": torch.compile(
            exchanging, backend="asyncep", dynamic=True, options={"disable": ["localise", "complete_shards"]}
        ),
        "gathered": torch.compile(
            gathering, backend="asyncep", dynamic=True, options={"link": f"emulate:{rate}", "timeout_s": 300.0}
        ),
    }
    points = []
    for tokens in CROSSOVER_TOKENS:
        given = _inputs(tokens, sequence)
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(repeats):
            for name, run in forms.items():
                dist.barrier()
                step = functools.partial(run, **given)
                _seconds_alone(step, 2)  # the ring was filled ahead meanwhile, which steady steps do not find
                seconds[name].append(statistics.fmean(_seconds_alone(step, _STEADY_STEPS)))
        slowest = {name: statistics.median(_slowest(values)) for name, values in seconds.items()}
        points.append(BothForms(tokens, slowest["AllToAll"], slowest["gathered"]))
    return points


def crossing_of(points: Sequence[BothForms]) -> float | None:
    """Tokens at which both take as long, by a line between the points, logarithmic on both axes; None: nowhere."""
    for left, right in itertools.pairwise(points):
        before, after = (one.exchanged_seconds / one.gathered_seconds for one in (left, right))
        if before < 1 <= after:
            return left.tokens * (right.tokens / left.tokens) ** (-math.log(before) / math.log(after / before))
    return None


def _exchanging_model(form: type[AllToAllExperts]) -> PreTrainedModel:
    """The reference model with experts spread over the ranks, exchanged by AllToAll."""
    model = _model(CROSSOVER_LAYERS)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        owned = ExpertPlacement(experts.gate_up_proj.shape[0], RANKS, dist.get_rank()).owned
        own = [
            weights[owned.start : owned.stop].detach().clone() for weights in (experts.gate_up_proj, experts.down_proj)
        ]
        layer.mlp.experts = form(*own, experts.gate_up_proj.shape[0])
    return model


def _slowest(times: list[float]) -> list[float]:
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest]

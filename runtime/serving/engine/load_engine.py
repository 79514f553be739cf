"""From a checkpoint to an engine that is warm: loaded, surveyed, compiled, and measured.

Pseudo-code
    load the model, its experts at their home
    survey its attention, and try a small trie on it: a trie where both agree, else padded rows
    compare a few outputs with the model's own; refuse it where they differ
        of a trie, the last layer computes the read tokens alone, unless it is that which makes them differ
    limits: the plan's threshold, and the tokens that fit into memory
    warm up: steps of different sizes compile what there is to compile, and the largest tells FLOPs per second
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from moepass.models.checkpoint.checkpoint_folders import load_model
from moepass.models.errors import CheckpointError, InputError
from moepass.passes.planner.strategies import MICRO_BATCH_TOKENS
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.homes.registry.home_options import HomeOptions
from moepass.runtime.offload.loading import load_pretrained, offload_report
from moepass.runtime.serving.attention.last_layer import LastLayer
from moepass.runtime.serving.attention.probe import probe_trie
from moepass.runtime.serving.attention.survey import AttentionSurvey, survey_attention
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME
from moepass.runtime.serving.cache.block_index import BlockIndex
from moepass.runtime.serving.cache.block_memory import BlockMemory, KeyValueShape, block_bytes
from moepass.runtime.serving.engine.backbones import RowsBackbone, TrieBackbone
from moepass.runtime.serving.engine.model_engine import EngineCounters, ModelEngine
from moepass.runtime.serving.engine.model_head import ModelHead
from moepass.runtime.serving.engine.model_sizes import ModelSizes, model_sizes
from moepass.runtime.serving.engine.padded_rows import PaddedRows
from moepass.runtime.serving.engine.plain_outputs import (
    PlainOutputs,
    check_outputs,
    check_single_reads,
    plain_outputs,
    sequence_step,
)
from moepass.runtime.serving.engine.step_engine import EngineFacts, StepResult, step_form_text
from moepass.runtime.serving.engine.summed_experts import use_summed_experts
from moepass.runtime.serving.engine.trie_states import TrieStates
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead, Vector
from moepass.runtime.torch_private import constraint_violation_error, frames_compiled, quiet_log

logger = logging.getLogger("moepass")

# [Empirical] Parts of the memory that is free after loading: for blocks of the cache by default, and for the
# activations of a step. The rest is for logits, masks and what torch keeps.
CACHE_SHARE = 0.1
ACTIVATION_SHARE = 0.4
# More blocks than that hold hardly more prefixes. [Empirical]
MOST_CACHE_BYTES = 4 << 30
# Tokens of a padded row group, where a model takes no trie.
ROWS_TOKENS = MICRO_BATCH_TOKENS
# Tokens of a sequence of the full step that is measured.
WARM_UP_TOKENS = 256

# Lengths of two streams that have nothing in common with other sizes of a model. Vocabularies are larger.
LEARNED_COUNTS = (19, 23)

LOOPS_OVER_TOKENS = "it loops over tokens, or chunks of them, so that each graph would be for some lengths alone"

# Compiles a module, whose arguments are tensors.
Compile = Callable[[nn.Module], Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How a model is served.

    home            where experts rest; None: on the device, as transformers loads them
    cache_bytes     for prefix blocks: 0 switches the cache off, None is a part of the memory that is free
    step_tokens     a step is full from so many tokens on; None: as the plan says
    sharers         processes that share the memory of this device, this one included
    warms_up        before the first request, so that none waits for a compiler
    """

    home: HomeOptions | None
    device: torch.device
    dtype: torch.dtype | None = None
    slots: int | None = None
    memory_budget: str | None = None
    hardware: str | None = None
    cache_bytes: int | None = None
    step_tokens: int | None = None
    sharers: int = 1
    warms_up: bool = True


class _FullStep(NamedTuple):
    """From how many tokens on a step is full, and who says so."""

    tokens: int
    source: str


def load_engine(folder: Path, options: EngineOptions, compile_module: Compile | None, key: bytes) -> ModelEngine:
    """An engine of the checkpoint in `folder`; `compile_module` None runs the model uncompiled.

    Raises CheckpointError, also for a model whose outputs are not finite, and what `load_pretrained` raises.
    """
    return make_engine(_loaded(folder, options), options, compile_module, key)


def make_engine(
    model: PreTrainedModel, options: EngineOptions, compile_module: Compile | None, key: bytes
) -> ModelEngine:
    """An engine of `model`, which belongs to it from then on, warmed up where that is asked for.

    Raises InputError for a model that is not its backbone and its head one after the other, token by token.
    """
    store = _placed_store(model)
    if store is not None:
        store.tells_of_uncompiled_calls = False  # the survey and the probe are no compiled calls, and short
    head = ModelHead(model)
    survey = survey_attention(model)
    refusal = survey.refusal or probe_trie(model, survey)
    free = _free_bytes(options.device) // options.sharers
    shapes = survey.shapes if refusal is None else ()
    blocks = _block_count(shapes, options, free)
    runner: TrieStates | PaddedRows
    backbone: nn.Module
    narrowing: _Narrowing | None
    # The probe of a trie has shown that no token of one depends on those behind or beside it.
    plain = plain_outputs(model, head, with_prefix=refusal is not None)
    if refusal is None:
        model.set_attn_implementation(TRIE_ATTENTION_NAME)
        if compile_module is None:
            use_summed_experts(model)
        memory = BlockMemory(shapes, blocks * block_bytes(shapes), options.device) if blocks else None
        runner = TrieStates(TrieBackbone(head.backbone), survey.layers, memory, options.device)
        narrowing = _narrowed(head, survey, plain, runner)
        backbone, obstacle = narrowing.backbone, narrowing.obstacle
    else:
        logger.info("every sequence is computed by itself, as padded rows: %s", refusal)
        backbone = RowsBackbone(head.backbone)
        runner = PaddedRows(backbone, options.device, ROWS_TOKENS)
        check_outputs(plain, head, runner)
        narrowing, obstacle = None, "steps are padded rows"
    is_compiled = False
    if compile_module is not None:
        try:
            is_compiled = _compile(compile_module, backbone, plain, head, runner)
        except Exception as error:  # of code that Dynamo sees in two ways, where the last layer runs twice
            if narrowing is None or narrowing.handle is None:
                raise
            narrowing = narrowing.undone(error)
            backbone, obstacle = narrowing.backbone, narrowing.obstacle
            is_compiled = _compile(compile_module, backbone, plain, head, runner)
    sizes = model_sizes(model, narrows=not obstacle)
    full_step = _full_step(store, options)
    facts = _facts(model, head, sizes, full_step, survey, refusal, free)
    narrowed = "the read tokens alone" if not obstacle else f"all tokens, because {obstacle}"
    facts = dataclasses.replace(facts, notes={**facts.notes, "last layer": f"behind its attention {narrowed}"})
    if compile_module is not None and not is_compiled:
        facts = dataclasses.replace(facts, notes={**facts.notes, "compiled": f"no: {LOOPS_OVER_TOKENS}"})
    counters = EngineCounters(_exposed_seconds(store), lambda: frames_compiled()[0])
    size = block_bytes(shapes) if blocks else 0
    engine = ModelEngine(
        head, runner, sizes.table, facts, index=BlockIndex(blocks), key=key, counters=counters, block_bytes=size
    )
    if store is not None:
        store.tells_of_uncompiled_calls = is_compiled
    if options.warms_up:
        warm_up(engine, full_step.tokens)
    return engine


class _Narrowing(NamedTuple):
    """A backbone whose last layer computes the read tokens alone, where `handle` is not None.

    Else it computes all tokens, because of `obstacle`.
    """

    backbone: TrieBackbone
    obstacle: str = ""
    handle: RemovableHandle | None = None

    def undone(self, error: Exception) -> _Narrowing:
        if self.handle is not None:
            self.handle.remove()
        obstacle = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.warning("the last layer computes all tokens, not the read ones alone: %s", obstacle)
        logger.debug("the last layer computes all tokens", exc_info=error)
        return _Narrowing(TrieBackbone(self.backbone.backbone), obstacle)


def _narrowed(head: ModelHead, survey: AttentionSurvey, plain: PlainOutputs, runner: TrieStates) -> _Narrowing:
    """What it gives runs in `runner`. Raises InputError where all tokens give something else than the model, too."""
    assert survey.last is not None
    last_layer = LastLayer()
    whole = TrieStates(TrieBackbone(head.backbone), runner.layers, runner.memory, runner.device)
    narrowing = _Narrowing(TrieBackbone(head.backbone, last_layer))
    try:
        narrowing = narrowing._replace(handle=last_layer.attach(head.backbone, survey.last))
        last_layer.learn(lambda count: whole.states(sequence_step(count)), LEARNED_COUNTS)
        runner.forward = narrowing.backbone
        check_outputs(plain, head, runner)
        check_single_reads(plain, head, runner, whole)
    except Exception as error:  # the model's own code meets numbers of tokens that it does not expect
        narrowing = narrowing.undone(error)
        runner.forward = narrowing.backbone
        check_outputs(plain, head, runner)
    return narrowing


def _compile(
    compile_module: Compile,
    backbone: nn.Module,
    plain: PlainOutputs,
    head: ModelHead,
    runner: TrieStates | PaddedRows,
) -> bool:
    """Let `runner` run `backbone` compiled; False where no graph of it is for all numbers of tokens."""
    runner.forward = compile_module(backbone)
    try:
        with quiet_log("torch._guards"):
            check_outputs(plain, head, runner)
    except constraint_violation_error():
        # As in some recurrent layers: lengths would be compiled when they first come.
        logger.warning("the model runs uncompiled: %s", LOOPS_OVER_TOKENS)
        runner.forward = backbone
        return False
    return True


def warm_up(engine: ModelEngine, full_step_tokens: int) -> None:
    """Run steps of all kinds, so that nothing is left to compile, and measure how fast a full one is.

    Steps of one token, of two, of a trie with prefixes that come from the cache the second time, and full ones.
    """
    facts = engine.facts
    longest = min(facts.max_sequence_tokens, facts.most_tokens)
    tokens = np.random.default_rng(0).integers(0, facts.vocabulary_size, size=longest, dtype=np.int32)

    def read(place: int) -> tuple[TokenRead, ...]:
        return (TokenRead(place, tokens[:1], 1),) if facts.predicts_tokens else ()

    def request(number: int, length: int, branches: int = 0) -> Request:
        vector: Vector | None = None if facts.predicts_tokens else "last"
        pieces = [TokenPiece(-1, np.roll(tokens, number)[:length], read(length - 1), vector=vector)]
        pieces += [TokenPiece(0, tokens[place : place + 1], read(0), vector=vector) for place in range(branches)]
        return Request(f"warm-up {number}", tuple(pieces), salt=b"warm-up")

    trie = request(1, max(1, min(longest - 1, 40)), min(3, longest - 1))

    def run(asked: list[Request]) -> StepResult:
        result = engine.step(asked)
        _check_numbers(result)
        return result

    for asked in ([request(0, 1)], [request(0, min(longest, 2))], [trie], [trie]):
        run(asked)
    length = min(longest, WARM_UP_TOKENS)
    full = [request(number, length) for number in range(max(1, min(full_step_tokens, facts.most_tokens) // length))]
    fastest = min((run(full) for _ in range(2)), key=lambda result: result.seconds)
    engine.be_ready(max(1.0, fastest.flops) / fastest.seconds)


def _check_numbers(result: StepResult) -> None:
    """Raises CheckpointError where an answer holds something else than numbers."""
    pieces = [piece for answer in result.answers for piece in answer.pieces]
    values = [read.top_log_probabilities for piece in pieces for read in piece.reads]
    values += [piece.vector for piece in pieces if piece.vector is not None]
    if not all(np.isfinite(numbers).all() for numbers in values):
        raise CheckpointError(
            "the model's outputs are not finite; its weights are damaged, or too large for their type (serve the model "
            "in float32 to tell which)",
            name="output",
        )


def _loaded(folder: Path, options: EngineOptions) -> PreTrainedModel:
    if options.home is None:
        model = load_model(folder, options.dtype)
        model.to(options.device)
        return model
    return load_pretrained(
        folder,
        home=options.home,
        device=options.device,
        slots=options.slots,
        memory_budget=options.memory_budget,
        hardware=options.hardware,
        tokens=options.step_tokens,
        dtype=options.dtype,
        progress=lambda done, total: None,
    )


def _facts(
    model: PreTrainedModel,
    head: ModelHead,
    sizes: ModelSizes,
    full_step: _FullStep,
    survey: AttentionSurvey,
    refusal: str | None,
    free_bytes: int,
) -> EngineFacts:
    config = model.config.get_text_config()
    limits = (getattr(config, "max_position_embeddings", None), survey.position_limit)
    longest = min((int(limit) for limit in limits if limit), default=1 << 30)
    most_tokens = max(1, int(ACTIVATION_SHARE * free_bytes / sizes.token_bytes))
    names = model.config.id2label if head.kind == "classes" else {}
    return EngineFacts(
        form="trie" if refusal is None else "rows",
        saturation_flops=full_step.tokens * sizes.table.total(1),
        flops_per_second=0.0,
        most_tokens=most_tokens,
        max_sequence_tokens=longest,
        vocabulary_size=int(config.vocab_size),
        predicts_tokens=head.kind == "tokens",
        vector="class scores" if head.kind == "classes" else "embedding",
        class_names=tuple(str(names[number]) for number in sorted(names)),
        notes={
            "steps": step_form_text(refusal),
            "full step": f"{full_step.tokens} tokens, {full_step.source}",
            "largest step": f"{most_tokens} tokens",
            **({} if sizes.note is None else {"costs": sizes.note}),
        },
        full_step_tokens=full_step.tokens,
    )


def _full_step(store: BankStore | None, options: EngineOptions) -> _FullStep:
    if options.step_tokens:
        return _FullStep(options.step_tokens, "as asked for")
    # By the plan of an offloaded model, where a profile of the machine was known.
    threshold = None if store is None or store.placed is None else store.placed.decisions.threshold_tokens
    if threshold:
        return _FullStep(threshold, "the plan's saturation threshold")
    unknown = "" if store is None or store.placed is None else store.placed.unknown
    return _FullStep(MICRO_BATCH_TOKENS, f"[Empirical], without a plan{f': {unknown}' if unknown else ''}")


def _placed_store(model: PreTrainedModel) -> BankStore | None:
    try:
        return offload_report(model).store
    except InputError:  # its experts were not offloaded
        return None


def _exposed_seconds(store: BankStore | None) -> Callable[[], float]:
    if store is None or not store.banks:
        return lambda: 0.0
    return lambda: store.ring().statistics.waited_seconds


def _block_count(shapes: Sequence[KeyValueShape], options: EngineOptions, free_bytes: int) -> int:
    if not shapes:
        return 0
    limit = options.cache_bytes
    if limit is None:
        limit = min(MOST_CACHE_BYTES, int(CACHE_SHARE * free_bytes))
    elif limit > free_bytes:
        raise InputError(
            f"a cache of {limit / 1e9:.3g} GB is more than the {free_bytes / 1e9:.3g} GB of memory that are free for "
            "this rank; give less, or leave it out for a tenth of them",
            name="kv_cache",
            value=limit,
            expected=free_bytes,
        )
    count = limit // block_bytes(shapes)
    if limit and not count:
        raise InputError(
            f"{limit} bytes hold no block of the cache, which takes {block_bytes(shapes)}; give more, or switch it off",
            name="kv_cache",
            value=limit,
            expected=block_bytes(shapes),
        )
    return count


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)

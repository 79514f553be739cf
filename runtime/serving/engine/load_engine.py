"""Loading of an engine: from a checkpoint to a surveyed, compiled and measured model.

Pseudo-code
    load the model, with its experts at their home
    survey its attention, and run a small trie on it: use tries if both agree, padded rows otherwise
    compare a few outputs with the model's own, and refuse the model if they differ
        with a trie, the last layer computes only tokens whose output is requested, unless that changes outputs
    set limits: the plan's saturation threshold, and the tokens that fit into memory
    warm up: run steps of different sizes, so that everything is compiled, and measure FLOPs per second of the largest
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
from moepass.runtime.homes.options.home_options import HomeOptions
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

# [Empirical] Shares of the memory that is free after loading: for the cache by default, and for the activations of a
# step. The remaining memory is for logits, masks and torch's allocator.
CACHE_SHARE = 0.1
ACTIVATION_SHARE = 0.4
# [Empirical] Default limit of the cache: more blocks hardly hold more prefixes.
MOST_CACHE_BYTES = 4 << 30
# Tokens of a group of padded rows.
ROWS_TOKENS = MICRO_BATCH_TOKENS
# Tokens per sequence of the full step that is measured.
WARM_UP_TOKENS = 256

# Lengths of two streams that differ from other sizes in a model. Vocabularies are larger.
LEARNED_COUNTS = (19, 23)

LOOPS_OVER_TOKENS = "it loops over tokens, or chunks of tokens, so each graph would only serve some lengths"

# Compiles a module with three tensor arguments.
Compile = Callable[[nn.Module], Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The options of an engine.

    Attributes:
        home: home of the experts; None loads them on the device, as transformers does.
        device: device of the computation.
        dtype: type of the model, by default that of the checkpoint.
        slots: slots of the ring, by default as planned.
        memory_budget: device memory for weights, slots and activations, such as "6GB"; None for no budget.
        hardware: name of a hardware profile for the plan.
        cache_bytes: size of the prefix cache; 0 switches it off, None takes a share of the free memory.
        step_tokens: tokens of a full step, by default as planned.
        sharers: number of processes that share the memory of the device, this one included.
        warms_up: run steps before the first request, so that no request waits for a compilation.
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
    """The tokens of a full step, and the source of this number."""

    tokens: int
    source: str


def load_engine(folder: Path, options: EngineOptions, compile_module: Compile | None, key: bytes) -> ModelEngine:
    """Return an engine of the checkpoint in `folder`.

    `compile_module` compiles the backbone; with None the model runs uncompiled. `key` is the key of the block hashes.

    Raises:
        CheckpointError: the outputs of the model are not finite. Also everything that `load_pretrained` raises.
    """
    return make_engine(_loaded(folder, options), options, compile_module, key)


def make_engine(
    model: PreTrainedModel, options: EngineOptions, compile_module: Compile | None, key: bytes
) -> ModelEngine:
    """Return an engine of `model`, which it owns from now on.

    Raises:
        InputError: the model cannot be separated into a backbone and a head that are applied token by token.
    """
    store = _placed_store(model)
    if store is not None:
        store.warns_of_uncompiled_calls = False  # the survey and the probe run uncompiled on purpose
    head = ModelHead(model)
    survey = survey_attention(model)
    refusal = survey.refusal or probe_trie(model, survey)
    free_bytes = _free_bytes(options.device) // options.sharers
    shapes = survey.shapes if refusal is None else ()
    block_count = _block_count(shapes, options, free_bytes)
    runner: TrieStates | PaddedRows
    backbone: nn.Module
    narrowing: _Narrowing | None
    # If tries are used, the probe has shown that no token depends on later tokens or other branches.
    plain = plain_outputs(model, head, with_prefix=refusal is not None)
    if refusal is None:
        model.set_attn_implementation(TRIE_ATTENTION_NAME)
        if compile_module is None:
            use_summed_experts(model)
        memory = BlockMemory(shapes, block_count * block_bytes(shapes), options.device) if block_count else None
        runner = TrieStates(TrieBackbone(head.backbone), survey.layers, memory, options.device)
        narrowing = _narrowed(head, survey, plain, runner)
        backbone, obstacle = narrowing.backbone, narrowing.obstacle
    else:
        logger.info("steps are padded rows, without shared prefixes: %s", refusal)
        backbone = RowsBackbone(head.backbone)
        runner = PaddedRows(backbone, options.device, ROWS_TOKENS)
        check_outputs(plain, head, runner)
        narrowing, obstacle = None, "steps are padded rows"
    is_compiled = False
    if compile_module is not None:
        try:
            is_compiled = _compile(compile_module, backbone, plain, head, runner)
        except Exception as error:  # Dynamo may fail on the last layer, which runs twice
            if narrowing is None or narrowing.handle is None:
                raise
            narrowing = narrowing.undone(error)
            backbone, obstacle = narrowing.backbone, narrowing.obstacle
            is_compiled = _compile(compile_module, backbone, plain, head, runner)
    sizes = model_sizes(model, narrows=not obstacle)
    full_step = _full_step(store, options)
    facts = _facts(model, head, sizes, full_step, survey, refusal, free_bytes)
    last_layer = f"computes all tokens, because {obstacle}" if obstacle else "computes only the read tokens"
    facts = dataclasses.replace(facts, notes={**facts.notes, "last layer": last_layer})
    if compile_module is not None and not is_compiled:
        facts = dataclasses.replace(facts, notes={**facts.notes, "compiled": f"no: {LOOPS_OVER_TOKENS}"})
    counters = EngineCounters(_exposed_seconds(store), lambda: frames_compiled()[0])
    size = block_bytes(shapes) if block_count else 0
    engine = ModelEngine(
        head, runner, sizes.table, facts, index=BlockIndex(block_count), key=key, counters=counters, block_bytes=size
    )
    if store is not None:
        store.warns_of_uncompiled_calls = is_compiled
    if options.warms_up:
        warm_up(engine, full_step.tokens)
    return engine


class _Narrowing(NamedTuple):
    """A backbone, and whether its last layer computes only tokens whose output is requested.

    Attributes:
        backbone: the module to compile.
        obstacle: the reason why the last layer computes all tokens; empty if it computes the read ones only.
        handle: removes the hook that narrows the last layer; None if it computes all tokens.
    """

    backbone: TrieBackbone
    obstacle: str = ""
    handle: RemovableHandle | None = None

    def undone(self, error: Exception) -> _Narrowing:
        """Return a backbone whose last layer computes all tokens because of `error`."""
        if self.handle is not None:
            self.handle.remove()
        obstacle = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.warning("the last layer computes all tokens instead of the read ones: %s", obstacle)
        logger.debug("the last layer computes all tokens", exc_info=error)
        return _Narrowing(TrieBackbone(self.backbone.backbone), obstacle)


def _narrowed(head: ModelHead, survey: AttentionSurvey, plain: PlainOutputs, runner: TrieStates) -> _Narrowing:
    """Return a backbone for `runner`, narrowed if that does not change the outputs.

    Raises:
        InputError: the outputs differ from the model's own even if the last layer computes all tokens.
    """
    assert survey.last is not None
    last_layer = LastLayer()
    unnarrowed = TrieStates(TrieBackbone(head.backbone), runner.layers, runner.memory, runner.device)
    narrowing = _Narrowing(TrieBackbone(head.backbone, last_layer))
    try:
        narrowing = narrowing._replace(handle=last_layer.attach(head.backbone, survey.last))
        last_layer.learn(lambda count: unnarrowed.states(sequence_step(count)), LEARNED_COUNTS)
        runner.forward = narrowing.backbone
        check_outputs(plain, head, runner)
        check_single_reads(plain, head, runner, unnarrowed)
    except Exception as error:  # the model's own code may not expect different numbers of tokens
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
    """Let `runner` run `backbone` compiled. Return False if no graph covers all numbers of tokens."""
    runner.forward = compile_module(backbone)
    try:
        with quiet_log("torch._guards"):
            check_outputs(plain, head, runner)
    except constraint_violation_error():
        # Some recurrent layers would be compiled again for each new length.
        logger.warning("the model runs uncompiled: %s", LOOPS_OVER_TOKENS)
        runner.forward = backbone
        return False
    return True


def warm_up(engine: ModelEngine, full_step_tokens: int) -> None:
    """Run steps of all kinds, so that nothing is left to compile, and measure the speed of a full step.

    The steps have one token, two tokens, a trie whose prefixes come from the cache in the second run, and a full step.
    """
    facts = engine.facts
    longest = min(facts.max_sequence_tokens, facts.most_tokens)
    tokens = np.random.default_rng(0).integers(0, facts.vocabulary_size, size=longest, dtype=np.int32)

    def read(index: int) -> tuple[TokenRead, ...]:
        return (TokenRead(index, tokens[:1], 1),) if facts.predicts_tokens else ()

    def request(number: int, length: int, branches: int = 0) -> Request:
        vector: Vector | None = None if facts.predicts_tokens else "last"
        pieces = [TokenPiece(-1, np.roll(tokens, number)[:length], read(length - 1), vector=vector)]
        pieces += [TokenPiece(0, tokens[index : index + 1], read(0), vector=vector) for index in range(branches)]
        return Request(f"warm-up {number}", tuple(pieces), salt=b"warm-up")

    trie = request(1, max(1, min(longest - 1, 40)), min(3, longest - 1))

    def run(requests: list[Request]) -> StepResult:
        result = engine.step(requests)
        _check_numbers(result)
        return result

    for requests in ([request(0, 1)], [request(0, min(longest, 2))], [trie], [trie]):
        run(requests)
    length = min(longest, WARM_UP_TOKENS)
    full = [request(number, length) for number in range(max(1, min(full_step_tokens, facts.most_tokens) // length))]
    fastest = min((run(full) for _ in range(2)), key=lambda result: result.seconds)
    engine.be_ready(max(1.0, fastest.flops) / fastest.seconds)


def _check_numbers(result: StepResult) -> None:
    """Raise CheckpointError if an answer contains values that are not finite."""
    pieces = [piece for answer in result.answers for piece in answer.pieces]
    values = [read.top_log_probabilities for piece in pieces for read in piece.reads]
    values += [piece.vector for piece in pieces if piece.vector is not None]
    if not all(np.isfinite(numbers).all() for numbers in values):
        raise CheckpointError(
            "the model's outputs are not finite: its weights are damaged, or too large for their dtype; serve the "
            "model in float32 to find out which",
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
    # The plan of an offloaded model has a threshold if a profile of the machine is known.
    threshold = None if store is None or store.placed is None else store.placed.decisions.threshold_tokens
    if threshold:
        return _FullStep(threshold, "the plan's saturation threshold")
    unknown = "" if store is None or store.placed is None else store.placed.unknown
    return _FullStep(MICRO_BATCH_TOKENS, f"[Empirical], without a plan{f': {unknown}' if unknown else ''}")


def _placed_store(model: PreTrainedModel) -> BankStore | None:
    try:
        return offload_report(model).store
    except InputError:  # the experts of the model are not offloaded
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
            f"the prefix cache was set to {limit / 1e9:.3g} GB, but only {free_bytes / 1e9:.3g} GB of memory are free "
            "for this rank; set less, or leave the option out to use a tenth of the free memory",
            name="kv_cache",
            value=limit,
            expected=free_bytes,
        )
    count = limit // block_bytes(shapes)
    if limit and not count:
        raise InputError(
            f"the prefix cache was set to {limit} bytes, but one block takes {block_bytes(shapes)}; set more, or 0 to "
            "switch the cache off",
            name="kv_cache",
            value=limit,
            expected=block_bytes(shapes),
        )
    return count


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)

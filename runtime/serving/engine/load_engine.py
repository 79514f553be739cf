"""Loading of an engine: from a checkpoint to a surveyed, compiled and measured model.

Pseudo-code
    load the model, with its experts at their home
    survey its attention, then compute a small trie: if the survey allows tries and the trie has the same outputs as
    separate sequences, steps are tries, otherwise padded rows
    compare a few outputs of the engine with those of the unchanged model, and refuse the model if they differ
        with a trie, the last layer computes only tokens whose output is requested, unless that changes outputs
    set limits: the plan's saturation threshold, and the tokens that fit into memory (step_memory.py)
    warm up: run steps of different sizes, so that everything is compiled, and measure FLOPs per second of the largest
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from moepass.models.byte_counts import parse_bytes
from moepass.models.checkpoint.load_model import is_quantized, load_model
from moepass.models.errors import CheckpointError, InputError
from moepass.models.limits import MODEL, STORED, ExpertFormat
from moepass.models.sizes.architecture import Architecture, short_dtype
from moepass.models.sizes.families import from_config
from moepass.passes.ir.planner_decisions import NO_MEMORY, DeviceMemory
from moepass.passes.planner.strategies import MICRO_BATCH_TOKENS, peak_activation_bytes
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.homes.options.home_options import Device, HomeOptions
from moepass.runtime.offload.loading import load_planned, offload_report
from moepass.runtime.offload.offload import NoExpertsError
from moepass.runtime.offload.placement import PlanningOptions
from moepass.runtime.serving.attention.survey import AttentionSurvey, survey_attention
from moepass.runtime.serving.attention.trie_attention import TRIE_ATTENTION_NAME
from moepass.runtime.serving.attention.varlen_attention import layer_obstacle
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.cache.block_index import BlockIndex
from moepass.runtime.serving.cache.block_memory import BlockMemory, KeyValueShape, block_bytes
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.engine.model_head import ModelHead, class_activation
from moepass.runtime.serving.engine.padded_rows import PaddedRows, RowsBackbone
from moepass.runtime.serving.engine.plain_outputs import Forward, PlainOutputs, check_outputs, plain_outputs, probe_trie
from moepass.runtime.serving.engine.step_engine import EngineFacts, StepResult, step_form_text
from moepass.runtime.serving.engine.step_memory import MemoryShare, StepSizes
from moepass.runtime.serving.engine.summed_experts import use_summed_experts
from moepass.runtime.serving.engine.trie_states import Narrowing, TrieBackbone, TrieStates, narrowed
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead, Vector
from moepass.runtime.system.device_names import device_name
from moepass.runtime.torch_private import constraint_violation_error, quiet_log

logger = logging.getLogger("moepass")

# Tokens of a group of padded rows.
ROWS_TOKENS = MICRO_BATCH_TOKENS
# Tokens per sequence of the full step that is measured.
WARM_UP_TOKENS = 256
# Rows of a step of many rows. torch chooses another convolution from 16 rows on, and so compiles another graph.
WARM_UP_ROWS = 64

# [Empirical] Generous bound of the activations of a layer that are alive at once, in widths of its widest product.
_WIDTHS = 8

LOOPS_OVER_TOKENS = "it loops over tokens, or chunks of tokens, so each graph would only serve some lengths"

# Compiles a backbone.
Compile = Callable[[nn.Module], Forward]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The options of an engine.

    Attributes:
        home: home of the experts; None loads them on the device, as transformers does. `Device` does the same for
            checkpoints without quantised experts, unless `expert_format` packs them.
        dtype: by default the checkpoint's dtype.
        slots: slots of the ring, by default as planned.
        memory_budget: device memory for weights, slots, steps and the cache, such as "6GB"; None for no budget.
        experts_compute: "fp8" if `compile_module` compiles experts that multiply in FP8.
        cache_bytes: size of the prefix cache; 0 switches it off, None takes a tenth of the budget or the free memory.
        step_tokens: tokens of a full step, by default as planned.
        sharers: number of processes that share the memory of the device, this one included.
        warms_up: run steps before the first request, so that no request waits for a compilation.
        expert_format: see `offload_experts`; with a home of None always "stored".
    """

    home: HomeOptions | None
    device: torch.device
    dtype: torch.dtype | None = None
    slots: int | None = None
    memory_budget: str | None = None
    experts_compute: str = MODEL
    hardware: str | None = None
    cache_bytes: int | None = None
    step_tokens: int | None = None
    sharers: int = 1
    warms_up: bool = True
    expert_format: ExpertFormat = STORED

    @property
    def memory_share(self) -> MemoryShare:
        """The memory of the device that this process may take, as it is now."""
        return MemoryShare.of(self.device, self.sharers, parse_bytes(self.memory_budget))

    def planning(self) -> PlanningOptions:
        """Return the options by which the planner places the experts before they are loaded."""
        share = self.memory_share
        cache_bytes = share.cache_bytes if self.cache_bytes is None else self.cache_bytes
        # Without a budget, a CPU runs models whose weights stay in their files.
        is_limited = share.budget_bytes is not None or self.device.type == "cuda"

        def serving_memory(architecture: Architecture | None, tokens: int, dtype: str) -> DeviceMemory:
            if architecture is None:
                return dataclasses.replace(NO_MEMORY, kv_bytes=float(cache_bytes))
            return StepSizes.of(architecture, dtype, self.device.type).memory(tokens, cache_bytes)

        return PlanningOptions(
            self.memory_budget,
            self.hardware,
            self.step_tokens,
            self.slots,
            experts_compute=self.experts_compute,
            serving_memory=serving_memory,
            device_bytes=share.all_bytes if is_limited else None,
        )


def load_engine(folder: Path, options: EngineOptions, compile_module: Compile | None, key: bytes) -> ModelEngine:
    """Return an engine of the checkpoint in `folder`.

    `compile_module` compiles the backbone; with None the model runs uncompiled. `key` is the key of the block hashes.
    Raises CheckpointError if the outputs of the model are not finite, and everything that `load_pretrained` raises.
    """
    return make_engine(_load(folder, options), options, compile_module, key)


def _load(folder: Path, options: EngineOptions) -> PreTrainedModel:
    home, is_packed = options.home, options.expert_format != STORED
    if home is not None and (not isinstance(home, Device) or is_packed or is_quantized(folder)):
        may_be_dense = isinstance(home, Device) and not is_packed
        with contextlib.suppress(NoExpertsError) if may_be_dense else contextlib.nullcontext():
            return load_planned(
                folder,
                home,
                options.device,
                options.planning,
                options.dtype,
                progress=lambda done, total: None,
                expert_format=options.expert_format,
            )
    model = load_model(folder, options.dtype)
    model.to(options.device)
    return model


def make_engine(
    model: PreTrainedModel, options: EngineOptions, compile_module: Compile | None, key: bytes
) -> ModelEngine:
    """Return an engine of `model`, which it owns from now on.

    Raises InputError if the model cannot be separated into a backbone and a head that are applied token by token.
    """
    store: BankStore | None = None
    with contextlib.suppress(InputError):  # the experts of the model are not offloaded
        store = offload_report(model).store
        store.warns_of_uncompiled_calls = False  # the survey and the probe run uncompiled on purpose
    head = ModelHead(model)
    survey = survey_attention(model)
    refusal = survey.refusal or probe_trie(model, survey)
    is_cuda = options.device.type == "cuda"
    weights, share = _weights(model, store), options.memory_share
    limit_bytes = share.limit_bytes(weights)
    room_bytes = limit_bytes - weights.peak_bytes
    shapes = survey.shapes if refusal is None else ()
    block_count = _block_count(shapes, options.cache_bytes, share.cache_bytes, room_bytes)
    cache_bytes = block_count * block_bytes(shapes)
    runner: TrieStates | PaddedRows
    # If tries are used, the probe has shown that no token depends on later tokens or other branches.
    plain = plain_outputs(model, head, with_prefix=refusal is not None)
    if refusal is None:
        model.set_attn_implementation(TRIE_ATTENTION_NAME)
        if compile_module is None:
            use_summed_experts(model)
        blocks = BlockMemory(shapes, block_count, options.device) if block_count else None
        runner = TrieStates(TrieBackbone(head.backbone), survey.layers, blocks, options.device)
        narrowing = narrowed(head, survey, plain, runner)
    else:
        logger.info("steps are padded rows, without shared prefixes: %s", refusal)
        narrowing = Narrowing(RowsBackbone(head.backbone), "steps are padded rows")
        runner = PaddedRows(narrowing.backbone, options.device, ROWS_TOKENS)
        check_outputs(plain, head, runner)
    is_compiled = False
    if compile_module is not None:
        try:
            is_compiled = _compile(compile_module, narrowing.backbone, plain, head, runner)
        except Exception as error:  # Dynamo may fail on the last layer, which runs twice
            if narrowing.handle is None:
                raise
            narrowing = narrowing.undone(error)
            is_compiled = _compile(compile_module, narrowing.backbone, plain, head, runner)
    obstacle = narrowing.obstacle
    table, token_bytes, cost_note = _model_sizes(model, narrows=not obstacle)
    layers = tuple(dataclasses.replace(layer, cache_index=0) for layer in survey.layers.values()) if shapes else ()
    config = model.config.get_text_config()
    width = 0 if head.kind == "states" else head.width
    state_bytes = int(config.hidden_size) * model.dtype.itemsize
    sizes = StepSizes(token_bytes, layers, width, state_bytes, options.device.type)
    most_tokens = sizes.most_tokens(room_bytes - cache_bytes, cache_bytes)
    if not most_tokens:
        least = sizes.memory(1, cache_bytes, weights)
        text = (
            f"a step of one token needs {least}, more than the limit of {limit_bytes / 1e9:.3g} GB; use a larger "
            "memory_budget, fewer slots or a smaller kv_cache"
        )
        raise InputError(text, name="memory_budget", value=options.memory_budget, expected=least.peak_bytes)
    full_step_tokens, source = _full_step(store, options)
    counted_tokens = min(full_step_tokens, most_tokens)
    memory = sizes.memory(counted_tokens, cache_bytes, weights)
    notes = {
        "device": f"{options.device} ({device_name(options.device)})",
        "steps": step_form_text(refusal),
        "full step": f"{full_step_tokens} tokens, {source}",
        "largest step": f"{most_tokens} tokens",
        "memory": f"{memory} of {limit_bytes / 1e9:.3g} GB, in a step of {counted_tokens} tokens",
        **({} if cost_note is None else {"costs": cost_note}),
        "last layer": f"computes all tokens, because {obstacle}" if obstacle else "computes only the read tokens",
    }
    if options.device.type == "cuda" and refusal is None and (reasons := _varlen_obstacles(survey)):
        notes["attention"] = f"takes a slower kernel for each part of a trie in {reasons}"
        logger.warning("attention %s", notes["attention"])
    if compile_module is not None and not is_compiled:
        notes["compiled"] = f"no: {LOOPS_OVER_TOKENS}"
    limits = (getattr(config, "max_position_embeddings", None), survey.position_limit)
    names = model.config.id2label if head.kind == "classes" else {}
    facts = EngineFacts(
        form="trie" if refusal is None else "rows",
        saturation_flops=full_step_tokens * table.total(1),
        flops_per_second=0.0,
        most_tokens=most_tokens,
        max_sequence_tokens=min((int(limit) for limit in limits if limit), default=1 << 30),
        vocabulary_size=int(config.vocab_size),
        predicts_tokens=head.kind == "tokens",
        vector="class scores" if head.kind == "classes" else "embedding",
        class_names=tuple(str(names[number]) for number in sorted(names)),
        notes=notes,
        full_step_tokens=full_step_tokens,
        class_activation=class_activation(model.config),
        padding_token=head.padding_token,
        memory=memory,
        memory_limit_bytes=limit_bytes,
    )

    def exposed_seconds() -> float:
        # An uncompiled model has no ring.
        ring = None if store is None else store.current_ring
        return 0.0 if ring is None else ring.statistics.waited_seconds

    engine = ModelEngine(
        head,
        runner,
        table,
        facts,
        index=BlockIndex(block_count),
        key=key,
        exposed_seconds=exposed_seconds,
        block_bytes=block_bytes(shapes) if block_count else 0,
        runs_ahead=is_cuda,
    )
    if store is not None:
        store.warns_of_uncompiled_calls = is_compiled
    if options.warms_up:
        warm_up(engine, sizes_double=is_cuda)
    return engine


def _compile(
    compile_module: Compile, backbone: nn.Module, plain: PlainOutputs, head: ModelHead, runner: TrieStates | PaddedRows
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


def warm_up(engine: ModelEngine, *, sizes_double: bool = False) -> None:
    """Run steps of all kinds, so that nothing is left to compile, and measure the speed of a full step.

    The steps have one token, two tokens, a trie whose prefixes come from the cache in the second run, if steps are
    padded rows also many short rows, and a full step. With `sizes_double` there are also steps of 1, 2, 4, ... tokens:
    GPU kernels of experts have other tiles whenever the rows of an expert have doubled (`rows_bucket`).

    Raises CheckpointError if an answer contains values that are not finite.
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

    def run(requests: list[Request]) -> StepResult:
        result = engine.step(requests)
        pieces = [piece for answer in result.answers for piece in answer.pieces]
        values = [read.top_log_probabilities for piece in pieces for read in piece.reads]
        values += [piece.vector for piece in pieces if piece.vector is not None]
        if not all(np.isfinite(numbers).all() for numbers in values):
            raise CheckpointError(
                "the model's outputs are not finite: its weights are damaged, or too large for their dtype; serve the "
                "model in float32 to find out which",
                name="output",
            )
        return result

    trie = request(1, max(1, min(longest - 1, 40)), min(3, longest - 1))
    steps = [[request(0, 1)], [request(0, min(longest, 2))], [trie], [trie]]
    if facts.form == "rows":
        steps.append([request(number, min(longest, 2)) for number in range(WARM_UP_ROWS)])
    for requests in steps:
        run(requests)
    length = min(longest, WARM_UP_TOKENS)
    full_step_tokens = min(facts.full_step_tokens, facts.most_tokens)

    def sequences(count: int) -> list[Request]:
        return [request(number, min(length, count)) for number in range(max(1, count // length))]

    if sizes_double:
        for power in range(full_step_tokens.bit_length()):
            run(sequences(1 << power))
    fastest = min((run(sequences(full_step_tokens)) for _ in range(2)), key=lambda result: result.seconds)
    engine.be_ready(max(1.0, fastest.flops) / fastest.seconds)


def _model_sizes(model: PreTrainedModel, *, narrows: bool) -> tuple[FlopsTable, float, str | None]:
    """Return FLOPs, bytes of activations per token, and the source of both if it is not the architecture.

    A model with an unknown architecture costs 2 FLOPs per parameter and token. Attention is not counted then, and all
    tokens pass through all layers.
    """
    try:
        architecture = from_config(model.config)
    except InputError as error:
        reason = str(error).partition(";")[0]
    else:
        token_bytes = peak_activation_bytes(architecture, 1, short_dtype(model.dtype))
        return FlopsTable(architecture, narrows=narrows), token_bytes, None
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    logit_numbers = 0 if head is None else head.weight.numel()
    outside = tables | ({id(head.weight)} if head is not None else set())
    numbers = sum(value.numel() for value in model.parameters() if id(value) not in outside)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    width = max([int(model.config.get_text_config().hidden_size), *(linear.out_features for linear in linears)])
    table = FlopsTable.of_parameters(numbers, logit_numbers)
    return table, float(_WIDTHS * width * 4), f"2 FLOPs per parameter and token, because {reason}"


def _varlen_obstacles(survey: AttentionSurvey) -> str:
    """Return how many layers of a model cannot use the varlen kernel, and why; empty if all can."""
    obstacles = list(map(layer_obstacle, survey.layers.values()))
    reasons = sorted({*obstacles} - {""})
    count = len(obstacles) - obstacles.count("")
    return f"{count} of {len(obstacles)} layers: {'; '.join(reasons)}" if reasons else ""


def _full_step(store: BankStore | None, options: EngineOptions) -> tuple[int, str]:
    """Return the number of tokens in a full step, and the source of this number."""
    if options.step_tokens:
        return options.step_tokens, "as asked for"
    # The plan of an offloaded model has a threshold if a profile of the machine is known.
    threshold = None if store is None or store.placed is None else store.placed.decisions.threshold_tokens
    if threshold:
        return threshold, "the plan's saturation threshold"
    unknown = "" if store is None or store.placed is None else store.placed.unknown
    return MICRO_BATCH_TOKENS, f"[Empirical], without a plan{f': {unknown}' if unknown else ''}"


def _weights(model: PreTrainedModel, store: BankStore | None) -> DeviceMemory:
    """Return the memory of the weights on the device and of the slots: as planned, or of all weights."""
    if store is None or store.placed is None:
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        return DeviceMemory(float(sum(tensor.nbytes for tensor in tensors.values())), 0.0, 0.0)
    planned = store.placed.decisions.memory
    assert planned is not None, "the plan of a placement has the weights"
    return DeviceMemory(planned.resident_bytes, planned.slot_bytes, 0.0)


def _block_count(shapes: Sequence[KeyValueShape], limit: int | None, default_bytes: int, room_bytes: float) -> int:
    """Return the blocks of a cache of `limit` bytes, by default of `default_bytes`, in `room_bytes` beside weights."""
    if not shapes:
        return 0
    if limit is None:
        limit = int(max(0.0, min(default_bytes, room_bytes)))
    elif limit > max(0.0, room_bytes):
        text = (
            f"the prefix cache was set to {limit / 1e9:.3g} GB, but beside weights and slots only "
            f"{room_bytes / 1e9:.3g} GB of memory are free for this rank; choose a smaller size, or omit the option to "
            "use a tenth of the memory budget, or of the free memory"
        )
        raise InputError(text, name="kv_cache", value=limit, expected=room_bytes)
    count = limit // block_bytes(shapes)
    if limit and not count:
        text = (
            f"the prefix cache was set to {limit} bytes, but one block takes {block_bytes(shapes)}; choose a larger "
            "size, or 0 to switch the cache off"
        )
        raise InputError(text, name="kv_cache", value=limit, expected=block_bytes(shapes))
    return count

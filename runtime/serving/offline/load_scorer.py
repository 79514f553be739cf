"""Loading of a checkpoint as a scorer of texts.

A compiled model runs faster but starts later. So the model stays uncompiled if the input is known to be short.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moepass.models.checkpoint.checkpoint_folders import (
    load_config,
    load_model,
    meta_model,
    resolve_model,
)
from moepass.models.errors import CheckpointError, InputError, OptionError
from moepass.models.homes import home_named
from moepass.models.sizes.families import from_config
from moepass.runtime.homes.options.packers import options_of
from moepass.runtime.offload.offload import check_device, find_expert_modules, offload_experts
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.engine.load_engine import Compile, EngineOptions, load_engine, make_engine
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.offline.make_writer import make_writer
from moepass.runtime.serving.offline.text_scorer import TextScorer
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.transfer.link import parse_link

logger = logging.getLogger("moepass")

# The common prefix of all prompts is cached if it has at least this number of tokens. Computing a shorter one in each
# step costs less than a cache lookup for each prompt.
_CACHED_PREFIX_TOKENS = 8 * BLOCK_TOKENS

# Compiling pays for inputs above this number of FLOPs. [Empirical] With one thread, compiling adds 15 s to the first
# start and 0.8 s to later ones, and makes a step a fifth faster.
COMPILED_FLOPS = 4e11
# [Empirical] Average over texts in many languages.
_BYTES_PER_TOKEN = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorerOptions:
    """The options of a scorer.

    Attributes:
        model: A checkpoint folder, or "demo".
        labels: The candidate answers; None for the labels of the template.
        template: "chat", "prompt", "plain" or the name of a file like prompt.json; None for chat if the checkpoint has
            a chat template, otherwise prompt.
        home: Where experts are stored.
        dtype: The dtype of the model; None for that of the checkpoint.
        batch_size: The largest number of texts in a step; None for as many as fill it.
        step_tokens: The number of tokens that fills a step; None for the plan's choice.
        slots: The number of slots of the ring.
        device: The device that computes.
        link: The link over which experts are streamed, "real" or emulated.
    """

    model: str
    labels: Sequence[str] | None = None
    template: str | None = None
    home: str = "host"
    dtype: torch.dtype | None = None
    batch_size: int | None = None
    step_tokens: int | None = None
    slots: int = 2
    device: str = "cpu"
    link: str = "real"


def load_scorer(
    options: ScorerOptions, compile_module: Compile | None, writer: PromptWriter | None = None
) -> TextScorer:
    """Load the checkpoint and return a scorer.

    Args:
        options: What to load, and how to score.
        compile_module: Compiles the model; None runs it uncompiled.
        writer: The writer that `make_writer` made for the same checkpoint and template, if there is one already.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        InputError: The device does not exist, or the model has no experts to stream.
        OptionError: Options contradict each other.
    """
    folder = resolve_model(options.model)
    device = check_device(options.device)
    if device.type == "meta":
        raise InputError(
            "device is 'meta', which cannot compute; use cpu, cuda or cuda:INDEX",
            name="device",
            value=options.device,
        )
    if parse_link(options.link).is_emulated and device.type != "cpu":
        raise OptionError(
            f"link is {options.link!r}, but the device is {options.device}; an emulated link requires device cpu",
            name="link",
            value=options.link,
        )
    home = home_named(options.home)
    if home.is_spread:
        raise OptionError(
            f"home is {home.name!r}, which distributes experts over several processes, but score runs in one process; "
            "use host, disk or device, or moepass serve --ranks",
            name="home",
            value=home.name,
        )
    load_config(folder)  # check the config before the tokenizer's loader reads it
    has_writer = writer is not None
    writer = writer or make_writer(folder, options.template)
    caches_prefix = len(_shared_prefix(writer)) >= _CACHED_PREFIX_TOKENS
    engine = _load(folder, options, device, compile_module, caches_prefix=caches_prefix)
    if not has_writer:  # a thread may use the caller's writer now, so it is not changed
        writer.most_tokens = min(engine.facts.max_sequence_tokens, engine.facts.most_tokens)
    if writer.has_chat_template:
        writer.check()
    labels = options.labels if options.labels is not None else writer.prompt.labels
    return TextScorer(engine, writer, labels, options.batch_size)


def compiling_pays(model: str, input_bytes: int | None) -> bool:
    """Return True if an input of this many bytes is finished earlier with a compiled model; None means unknown size.

    Raises:
        CheckpointError: The checkpoint cannot be read.
    """
    if input_bytes is None:
        return True
    try:
        architecture = from_config(load_config(resolve_model(model)))
    except CheckpointError:
        raise
    except InputError:  # the FLOPs of this architecture are unknown
        return True
    return input_bytes / _BYTES_PER_TOKEN * FlopsTable(architecture).total(1) > COMPILED_FLOPS


def seven_digits(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return `values`, from 0 to 1, rounded to seven significant digits, the precision of a 32-bit logit."""
    with np.errstate(divide="ignore"):
        decimals = 6 - np.floor(np.log10(values))
    # Powers of ten up to 22 are exact in double precision, so the quotient is the closest double to these digits.
    is_exact = decimals <= 22
    scale = 10.0 ** np.where(is_exact, decimals, 0.0)
    rounded = np.round(values * scale) / scale
    rounded[~is_exact] = [float(f"{value:.7g}") for value in values[~is_exact].tolist()]
    return rounded


def _shared_prefix(writer: PromptWriter) -> npt.NDArray[np.int32]:
    """Return the tokens that all prompts start with."""
    left, right = writer.encode([writer.render("1"), writer.render("a")])
    count = min(len(left), len(right))
    differ = np.flatnonzero(left[:count] != right[:count])
    return left[: int(differ[0]) if len(differ) else count]


def _load(
    folder: Path,
    options: ScorerOptions,
    device: torch.device,
    compile_module: Compile | None,
    *,
    caches_prefix: bool,
) -> ModelEngine:
    home = None
    if options.home != "device":
        home = dataclasses.replace(options_of(options.home), link=options.link)
    engine_options = EngineOptions(
        home,
        device,
        options.dtype,
        slots=options.slots,
        cache_bytes=None if caches_prefix else 0,
        step_tokens=options.step_tokens,
        warms_up=False,
    )
    key = secrets.token_bytes(32)
    try:
        return load_engine(folder, engine_options, compile_module, key)
    except CheckpointError:
        raise
    except InputError as error:
        if home is None:
            raise
        if not find_expert_modules(meta := meta_model(folder)):
            raise InputError(
                f"{options.model} has no experts to stream, because {type(meta).__name__} is dense; use --no-stream",
                name="model",
                value=options.model,
            ) from error
        if home.home != "host":
            raise
        # Some experts, such as quantised ones, cannot be read one by one. Then transformers loads the full model.
        logger.info("loading the full model before its experts are moved to the host: %s", error)
        model = load_model(folder, options.dtype)
        offload_experts(model, home, device, options.slots)
        return make_engine(model.to(device), engine_options, compile_module, key)

"""Loading of a checkpoint as a scorer of texts, uncompiled for a short input, because that starts sooner."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moepass.models.checkpoint.checkpoint_folders import load_config, meta_model, resolve_model
from moepass.models.checkpoint.load_model import load_model
from moepass.models.errors import CheckpointError, InputError, OptionError
from moepass.models.homes import home_named
from moepass.models.limits import ExpertFormat
from moepass.models.sizes.families import from_config
from moepass.runtime.homes.options.packers import options_of
from moepass.runtime.offload.offload import find_expert_modules, offload_experts, rank_device
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.engine.load_engine import Compile, EngineOptions, load_engine, make_engine
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.offline.text_scorer import TextScorer, shared_tokens
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


def load_scorer(
    model: str,
    writer: PromptWriter,
    compile_module: Compile | None,
    *,
    labels: Sequence[str] | None,
    home: str,
    dtype: torch.dtype | None,
    batch_size: int | None,
    step_tokens: int | None,
    slots: int,
    device: str,
    link: str,
    expert_format: ExpertFormat,
) -> TextScorer:
    """Load the checkpoint `model`, a folder or "demo", and return a scorer.

    `compile_module` compiles the model; with None it runs uncompiled. `writer` was made for the same checkpoint by
    `make_writer`, and is not changed. By default `labels` come from the template, `dtype` from the checkpoint, and
    `step_tokens` from the plan. `batch_size` limits the texts of a step; None limits only its tokens.

    Raises CheckpointError if the checkpoint cannot be read, InputError if the device does not exist or the model has no
    experts to stream, and OptionError for options that contradict each other.
    """
    folder, computing_device = resolve_model(model), rank_device(device)
    if computing_device.type == "meta":
        text = "device is 'meta', which cannot compute; use auto, cpu, cuda or cuda:INDEX"
        raise InputError(text, name="device", value=device)
    if parse_link(link).is_emulated and computing_device.type != "cpu":
        text = f"link is {link!r}, but the device is {computing_device}; an emulated link requires device cpu"
        raise OptionError(text, name="link", value=link)
    spec = home_named(home)
    if spec.is_spread:
        text = (
            f"home is {spec.name!r}, which distributes experts over several processes, but score runs in one process; "
            "use host, disk or device, or moepass serve --ranks"
        )
        raise OptionError(text, name="home", value=spec.name)
    caches_prefix = shared_tokens(*writer.encode([writer.render("1"), writer.render("a")])) >= _CACHED_PREFIX_TOKENS
    options = EngineOptions(
        dataclasses.replace(options_of(home), link=link),
        computing_device,
        dtype,
        slots=slots,
        cache_bytes=None if caches_prefix else 0,
        step_tokens=step_tokens,
        warms_up=False,
        expert_format=expert_format,
    )
    engine = _load(model, folder, options, compile_module)
    if writer.has_chat_template:
        writer.check()
    return TextScorer(engine, writer, writer.prompt.labels if labels is None else labels, batch_size)


def compiling_pays(model: str, input_bytes: int | None) -> bool:
    """Return True if an input of this many bytes is finished earlier with a compiled model; None means unknown size.

    Raises CheckpointError if the checkpoint cannot be read.
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


def _load(name: str, folder: Path, options: EngineOptions, compile_module: Compile | None) -> ModelEngine:
    key = secrets.token_bytes(32)
    try:
        return load_engine(folder, options, compile_module, key)
    except CheckpointError:
        raise
    except InputError as error:
        if options.home is None:
            raise
        if not find_expert_modules(meta := meta_model(folder)):
            text = f"{name} has no experts to stream, because {type(meta).__name__} is dense; use --no-stream"
            raise InputError(text, name="model", value=name) from error
        if options.home.home != "host":
            raise
        # The experts of some families cannot be read one by one. Then transformers loads the full model.
        logger.info("loading the full model before its experts are moved to the host: %s", error)
        model = load_model(folder, options.dtype)
        offload_experts(model, options.home, options.device, options.slots, expert_format=options.expert_format)
        return make_engine(model.to(options.device), options, compile_module, key)

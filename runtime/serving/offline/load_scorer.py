"""From a checkpoint to a scorer of texts.

A compiled model runs faster and starts later. So a short input runs uncompiled, where its length is known beforehand.
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
from moepass.runtime.homes.registry.packers import options_of
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

# Keys and values of what all prompts begin with are kept where that is so long. Shorter ones are computed again in each
# step, which costs less than to look every prompt up.
_KEPT_PREFIX_TOKENS = 8 * BLOCK_TOKENS


# FLOPs of an input from which on compiling pays. [Empirical] One thread: a second start takes 0.8 s longer than one
# that compiles nothing, the first start 15 s, and a compiled step takes a fifth less time.
COMPILED_FLOPS = 4e11
# [Empirical] Of text in many languages.
_BYTES_PER_TOKEN = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorerOptions:
    """How texts are scored.

    model           a checkpoint folder, or "demo"
    labels          None: those of the template
    template        chat, prompt, plain, the name of a file as prompt.json, or None: chat if there is one, else prompt
    home            where experts rest
    batch_size      texts of one step, at most; None: as many as fill it
    step_tokens     a step is full from so many tokens on; None: as the plan says
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
    """Load the checkpoint and make a scorer of it; `compile_module` None runs the model uncompiled.

    `writer`: the one of `make_writer` for the same checkpoint and template, where it is made already.

    Raises CheckpointError, InputError (a device that is not there, no experts to stream) and OptionError.
    """
    folder = resolve_model(options.model)
    device = check_device(options.device)
    if device.type == "meta":
        raise InputError(
            "device is 'meta', which computes nothing; it must be cpu, cuda or cuda:INDEX",
            name="device",
            value=options.device,
        )
    if parse_link(options.link).is_emulated and device.type != "cpu":
        raise OptionError(
            f"link is {options.link!r}, which exists for device cpu only; the device is {options.device}",
            name="link",
            value=options.link,
        )
    home = home_named(options.home)
    if home.is_spread:
        raise OptionError(
            f"home is {home.name!r}, which spreads experts over several processes, and score is one; use host, disk or "
            "device, or moepass serve --ranks",
            name="home",
            value=home.name,
        )
    load_config(folder)  # its checks come before the tokenizer's loader reads it too
    is_given = writer is not None
    writer = writer or make_writer(folder, options.template)
    keeps_prefix = len(_shared_prefix(writer)) >= _KEPT_PREFIX_TOKENS
    engine = _load(folder, options, device, compile_module, keeps_prefix=keeps_prefix)
    if not is_given:  # others may use it at this moment
        writer.most_tokens = min(engine.facts.max_sequence_tokens, engine.facts.most_tokens)
    if writer.has_chat_template:
        writer.check()
    labels = options.labels if options.labels is not None else writer.prompt.labels
    return TextScorer(engine, writer, labels, options.batch_size)


def compiling_pays(model: str, input_bytes: int | None) -> bool:
    """Whether an input of so many bytes is done earlier where the model is compiled. None: of any length.

    Raises CheckpointError.
    """
    if input_bytes is None:
        return True
    try:
        architecture = from_config(load_config(resolve_model(model)))
    except CheckpointError:
        raise
    except InputError:  # an architecture whose FLOPs are not known
        return True
    return input_bytes / _BYTES_PER_TOKEN * FlopsTable(architecture).total(1) > COMPILED_FLOPS


def seven_digits(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`values` from 0 to 1, to seven digits, which are what a 32-bit logit carries."""
    with np.errstate(divide="ignore"):
        decimals = 6 - np.floor(np.log10(values))
    # Powers of ten up to 22 are exact, and so the quotient is the number of double precision that has these digits.
    is_exact = decimals <= 22
    scale = 10.0 ** np.where(is_exact, decimals, 0.0)
    rounded = np.round(values * scale) / scale
    rounded[~is_exact] = [float(f"{value:.7g}") for value in values[~is_exact].tolist()]
    return rounded


def _shared_prefix(writer: PromptWriter) -> npt.NDArray[np.int32]:
    """The tokens that all prompts begin with."""
    one, other = writer.encode([writer.render("1"), writer.render("a")])
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return one[: int(differ[0]) if len(differ) else count]


def _load(
    folder: Path,
    options: ScorerOptions,
    device: torch.device,
    compile_module: Compile | None,
    *,
    keeps_prefix: bool,
) -> ModelEngine:
    home = None
    if options.home != "device":
        home = dataclasses.replace(options_of(options.home), link=options.link)
    asked = EngineOptions(
        home,
        device,
        options.dtype,
        slots=options.slots,
        cache_bytes=None if keeps_prefix else 0,
        step_tokens=options.step_tokens,
        warms_up=False,
    )
    key = secrets.token_bytes(32)
    try:
        return load_engine(folder, asked, compile_module, key)
    except CheckpointError:
        raise
    except InputError as error:
        if home is None:
            raise
        if not find_expert_modules(meta := meta_model(folder)):
            raise InputError(
                f"{options.model} has no experts to stream: {type(meta).__name__} is dense; use --no-stream",
                name="model",
                value=options.model,
            ) from error
        if home.home != "host":
            raise
        # Its experts cannot be read one by one, as quantised ones; transformers reads them all.
        logger.info("experts are read as a whole and moved then: %s", error)
        model = load_model(folder, options.dtype)
        offload_experts(model, home, device, options.slots)
        return make_engine(model.to(device), asked, compile_module, key)

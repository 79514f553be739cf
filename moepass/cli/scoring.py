"""From a checkpoint to a scorer, and from a score to a line of JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moepass.cli.input_lines import Line
from moepass.models.errors import InputError, OptionError

if TYPE_CHECKING:
    from moepass.runtime.serving.scoring import Score, Scorer

# What `score` writes itself; where an input line has a key of that name, it comes back as `input_KEY`.
_ANSWER_KEYS = ("label", "probabilities", "mass")


def make_scorer(model: str, *, lower: str, slots: int, stream: bool, device: str, link: str, compiled: bool) -> Scorer:
    """Load and, if asked for, offload and compile the checkpoint `model`.

    Raises CheckpointError, InputError (a device that is not there, no experts to stream) and OptionError.
    """
    import torch
    from transformers import PreTrainedModel

    from moepass.models.checkpoint.checkpoint_folders import (
        load_config,
        load_model,
        load_prompt,
        load_tokenizer,
        resolve_model,
    )
    from moepass.runtime.homes.registry.home_options import Host
    from moepass.runtime.offload.offload import check_device, find_expert_modules, offload_experts
    from moepass.runtime.serving.scoring import Forward, Scorer
    from moepass.runtime.transfer.link import parse_link
    from moepass.stored_compile import StoredModule

    folder = resolve_model(model)
    compute_device = check_device(device)
    if compute_device.type == "meta":
        raise InputError(
            "device is 'meta', which computes nothing; it must be cpu, cuda or cuda:INDEX", name="device", value=device
        )
    if parse_link(link).is_emulated and compute_device.type != "cpu":
        raise OptionError(
            f"link is {link!r}, which exists for device cpu only; the device is {device}", name="link", value=link
        )
    load_config(folder)  # its checks come before the tokenizer's loader reads it too
    tokenizer, prompt = load_tokenizer(folder), load_prompt(folder)
    loaded: PreTrainedModel = load_model(folder)
    if stream:
        if not find_expert_modules(loaded):
            raise InputError(
                f"{model} has no experts to stream: {type(loaded).__name__} is dense; use --no-stream",
                name="model",
                value=model,
            )
        offloaded = offload_experts(loaded, Host(link=link), compute_device, slots)
        offloaded.store.tells_of_uncompiled_calls = compiled
    loaded.to(compute_device)

    def compile_module(module: torch.nn.Module) -> Forward:
        return StoredModule(module, {"lower": lower}, model)

    return Scorer.of(loaded, tokenizer, prompt, compile_module if compiled else None)


def answer(line: Line, result: Score) -> dict[str, Any]:
    further = {f"input_{key}" if key in _ANSWER_KEYS else key: value for key, value in line.further.items()}
    # Seven digits are what a 32-bit logit carries.
    probabilities = {label: float(f"{value:.7g}") for label, value in result.probabilities.items()}
    return {"label": result.label, "probabilities": probabilities, "mass": float(f"{result.mass:.7g}"), **further}

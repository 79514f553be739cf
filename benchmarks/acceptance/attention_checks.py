"""Parts `versions` and `attention`: torch's varlen kernel, and attention over a trie against a dense mask."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.results import PartChecks
from benchmarks.on_gpu.expert_layers import relative_error
from benchmarks.on_gpu.target import Target, WrongResultError, conditions
from moepass.runtime.serving.attention.running_step import running_step
from moepass.runtime.serving.attention.survey import AttentionSurvey, survey_attention
from moepass.runtime.serving.attention.trie_attention import trie_attention
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.attention.varlen_attention import takes_varlen, varlen_obstacle
from tests.helpers.models.tiny import EXPERT_KINDS, tiny_model
from tests.helpers.serving.dense_attention import dense_attention
from tests.helpers.serving.trie_cases import LAYER, SCALING, TrieCase, trie_setting, trie_tensors

PASTS = {
    "whole past": VisiblePast(),
    "window of 128": VisiblePast(window=128),
    "chunks of 64": VisiblePast(chunk=64),
}
# The largest allowed error of a token by norm: rounding alone is 1e-6 and 4e-3, a wrong mask 0.1 and more.
MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


def versions(target: Target, checks: PartChecks, folder: Path) -> None:
    """Write the versions of hardware and software, and check the signature of torch's varlen kernel."""
    checks.run("machine", lambda: ", ".join(f"{name} {value}" for name, value in conditions(target).items()))
    checks.run("varlen signature", check_varlen_signature)


def attention(target: Target, checks: PartChecks, folder: Path) -> None:
    """Check attention over a trie in both dtypes, with all kinds of limits and sinks, and the survey of families."""
    for dtype, (name, past), has_sinks in itertools.product(MOST_ERROR, PASTS.items(), (False, True)):
        what = f"{str(dtype).removeprefix('torch.')}, {name}{', sinks' if has_sinks else ''}"
        case = trie_case(dtype, past, has_sinks)
        checks.run(what, functools.partial(check_trie_attention, case, target.device))
    for family in EXPERT_KINDS:
        checks.run(f"survey of {family}", functools.partial(check_survey, family, target.device))


def check_varlen_signature(obstacle: Callable[[torch.dtype, int, float], str] = varlen_obstacle) -> str:
    """Check that torch's varlen kernel takes all arguments that attention over a trie passes."""
    if reason := obstacle(torch.bfloat16, 128, 0.0):
        raise WrongResultError(f"{reason}; attention takes a slower kernel for each part of a trie")
    return f"varlen_attn of torch {torch.__version__} takes all arguments"


def check_survey(
    family: str, device: torch.device, survey: Callable[[PreTrainedModel], AttentionSurvey] = survey_attention
) -> str:
    """Check that the survey of a model on `device` finds what it finds on the CPU."""
    model = tiny_model(family)
    expected = survey_attention(model)
    found = survey(model.to(device))
    if found != expected:
        raise WrongResultError(
            f"finds {found.refusal or found.layers} instead of {expected.refusal or expected.layers}"
        )
    return f"{len(found.layers)} layers" if found.refusal is None else f"refused: {found.refusal}"


def trie_case(dtype: torch.dtype, past: VisiblePast, has_sinks: bool) -> TrieCase:
    """Return a layer with the heads of gpt-oss, and a prompt with 8 questions and 3 labels each after 48 cached tokens.

    Another sequence shares nothing with them.
    """
    prompt = tuple(range(150))
    sequences: list[tuple[int, ...]] = [tuple(range(200, 240))]
    for question in range(8):
        asked = prompt + tuple(range(1000 * (question + 1), 1000 * (question + 1) + 20 + question))
        sequences += [(*asked, *range(10_000 + 10 * label, 10_004 + 10 * label)) for label in range(3)]
    cached_tokens = (0, *[48] * (len(sequences) - 1))
    return TrieCase(tuple(sequences), cached_tokens, 8, 8, 64, 64, past, 0.0, has_sinks, dtype)


def check_trie_attention(
    case: TrieCase, device: torch.device, attend: Callable[..., torch.Tensor] = trie_attention
) -> str:
    """Check `attend` on `device` against one dense mask in float64 on the CPU."""
    step, running, blocks = trie_setting(case, device)
    tensors = trie_tensors(case, step.count)
    query, key, value, sinks = tensors
    expected = dense_attention(
        *(step, query, key, value, blocks, SCALING, case.past.window, case.past.chunk, case.softcap, sinks)
    )
    on_device = [None if tensor is None else tensor.to(device) for tensor in tensors]
    with running_step(running), torch.no_grad():
        actual = attend(*on_device, LAYER, SCALING, case.softcap).cpu()
    error = relative_error(actual[0].flatten(1), expected[0].flatten(1))
    if not error <= MOST_ERROR[case.dtype]:
        raise WrongResultError(f"a token differs from dense attention by {error:.1e} of its norm")
    takes_calls = takes_varlen(on_device[0], on_device[2], case.softcap) and running.calls(running.layers[LAYER])
    by = f"{len(takes_calls)} calls of varlen_attn" if takes_calls else "a kernel for each part"
    return f"{step.count} tokens, largest error {error:.1e}, {by}"

"""`moepass_summed`: an experts function of transformers for fp32 on a CPU, for models that run uncompiled.

It differs from `grouped_mm` of transformers in two points. The rows of an expert pass through all its layers while they
are in the processor's caches. And a single operator, which reads each result once, weights the results, restores the
order of the tokens and sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

SUMMED_EXPERTS_NAME = "moepass_summed"


def summed_experts_forward(
    module: Any, states: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts `expert_ids` [n, k] on `states` [n, hidden], and sum their outputs with `weights` [n, k].

    Unsupported modules and dtypes are passed on to `grouped_mm`.
    """
    is_plain = not (module.has_bias or module.has_post_expert_norm or module._is_expert_parallel)
    is_fp32_on_cpu = states.device.type == "cpu" and states.dtype == weights.dtype == torch.float32
    is_ours = is_plain and module.has_gate and is_fp32_on_cpu and len(states) and not torch.is_grad_enabled()
    if not is_ours or module.down_proj.dtype != torch.float32:
        result: torch.Tensor = grouped_mm_experts_forward(module, states, expert_ids, weights)
        return result
    tokens, choices = expert_ids.shape
    chosen = expert_ids.flatten()
    order = chosen.argsort()
    counts = torch.bincount(chosen, minlength=module.num_experts).tolist()
    results = states.new_empty(len(order), states.shape[1])
    rows = zip((order // choices).split(counts), results.split(counts), strict=True)
    banks = (bank if module.is_transposed else bank.mT for bank in (module.gate_up_proj, module.down_proj))
    for (tokens_of_expert, result), up, down in zip(rows, *(bank.unbind() for bank in banks), strict=True):
        if len(tokens_of_expert):
            torch.mm(module._apply_gate(states.index_select(0, tokens_of_expert) @ up), down, out=result)
    row_of_choice = torch.empty_like(order)
    row_of_choice[order] = torch.arange(len(order))
    return F.embedding_bag(row_of_choice.view(tokens, choices), results, mode="sum", per_sample_weights=weights)


def use_summed_experts(model: PreTrainedModel) -> None:
    """Let `model` compute its experts with `moepass_summed` if it would use `grouped_mm`."""
    if model._can_set_experts_implementation() and model.config._experts_implementation == "grouped_mm":
        model.set_experts_implementation(SUMMED_EXPERTS_NAME)


ALL_EXPERTS_FUNCTIONS.register(SUMMED_EXPERTS_NAME, summed_experts_forward)

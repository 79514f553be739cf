"""`moepass_summed`: experts in fp32 on a CPU, for models that run uncompiled.

As `grouped_mm` of transformers, with two differences: an expert's rows pass through all of its layers while they are in
the processor's caches; and to weigh the results, to bring them back into the order of the tokens and to add them up is
one operator, which reads them once.
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
    """states [n, hidden], expert_ids and weights [n, k] -> [n, hidden]. What it cannot do, `grouped_mm` does."""
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
    for (own, result), up, down in zip(rows, *(bank.unbind() for bank in banks), strict=True):
        if len(own):
            torch.mm(module._apply_gate(states.index_select(0, own) @ up), down, out=result)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return F.embedding_bag(places.view(tokens, choices), results, mode="sum", per_sample_weights=weights)


def use_summed_experts(model: PreTrainedModel) -> None:
    """Have `model` compute its experts so, where it would take `grouped_mm`."""
    if model._can_set_experts_implementation() and model.config._experts_implementation == "grouped_mm":
        model.set_experts_implementation(SUMMED_EXPERTS_NAME)


ALL_EXPERTS_FUNCTIONS.register(SUMMED_EXPERTS_NAME, summed_experts_forward)

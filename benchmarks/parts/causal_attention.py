"""Attention with the kernel's causal flag: under torch 2.13 transformers passes a mask to compiled models instead."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

CAUSAL = "causal"


def causal_attention() -> None:
    """Register the attention as `CAUSAL`, for `model.set_attn_implementation`."""

    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
        grouped = key.shape[1] != query.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return mixed.transpose(1, 2).contiguous(), None

    AttentionInterface.register(CAUSAL, attend)
    AttentionMaskInterface.register(CAUSAL, lambda *_, **__: None)

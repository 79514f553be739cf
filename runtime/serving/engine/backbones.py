"""The modules to compile: a model's backbone, which gives the states of chosen tokens and of no others."""

from __future__ import annotations

import torch
from torch import nn


class TrieBackbone(nn.Module):
    """The states at `places` [m] of one stream of tokens [1, n]; attention finds the trie in the running step."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0]
        return states[0, places]


class RowsBackbone(nn.Module):
    """The states at `places` [m] of padded rows [rows, tokens]; a place counts tokens over all rows."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]
        return states.flatten(0, 1)[places]

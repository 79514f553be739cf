"""The modules to compile: a model's backbone, which gives the states of chosen tokens and of no others."""

from __future__ import annotations

import torch
from torch import nn

from moepass.runtime.serving.attention.last_layer import LastLayer


class TrieBackbone(nn.Module):
    """The states at `places` [m] of one stream of tokens [1, n]; attention finds the trie in the running step.

    With `last_layer`, which is attached to `backbone`, the last layer computes these tokens alone.
    """

    def __init__(self, backbone: nn.Module, last_layer: LastLayer | None = None) -> None:
        super().__init__()
        self.backbone, self.last_layer = backbone, last_layer

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        if self.last_layer is None:
            return self._states(input_ids, position_ids)[0, places]
        self.last_layer.read(places)
        try:
            return self._states(input_ids, position_ids)[0]
        finally:
            self.last_layer.forget()

    def _states(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0]
        return states


class RowsBackbone(nn.Module):
    """The states at `places` [m] of padded rows [rows, tokens]; a place counts tokens over all rows."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]
        return states.flatten(0, 1)[places]

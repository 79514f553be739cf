"""The modules that are compiled: backbones that return hidden states only for tokens whose output is requested."""

from __future__ import annotations

import torch
from torch import nn

from moepass.runtime.serving.attention.last_layer import LastLayer


class TrieBackbone(nn.Module):
    """A backbone over one stream of tokens. Attention takes the trie from the running step.

    Args:
        backbone: the model's backbone.
        last_layer: attached to `backbone`; with it, the last layer computes only the tokens whose output is requested.
    """

    def __init__(self, backbone: nn.Module, last_layer: LastLayer | None = None) -> None:
        super().__init__()
        self.backbone, self.last_layer = backbone, last_layer

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the states [m, hidden] at `places` [m] of the stream [1, n]."""
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
    """A backbone over padded rows."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the states [m, hidden] at `places` [m], indices into the flattened rows [rows * tokens]."""
        states: torch.Tensor = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]
        return states.flatten(0, 1)[places]

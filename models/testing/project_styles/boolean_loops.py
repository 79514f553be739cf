"""Loops over experts on one device that select rows by boolean masks.

A module `Loop()` takes hidden states [tokens, HIDDEN] and gives as many.
"""

from __future__ import annotations

import torch

from moepass.models.testing.project_styles.local_loops import MaskLoop


class AnyPlace(MaskLoop):
    """Rows by a mask of tokens, weights by the mask of all pairs."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        for number in self.order:
            pairs = chosen == number
            mask = pairs.any(dim=-1)
            result[mask] += self.module_of(number)(hidden[mask]) * weights[pairs].unsqueeze(-1)
        return result


class FlatPairs(MaskLoop):
    """As DeepSeek's models write it for training: each pair is a row, and is overwritten by its expert's result."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        flat = chosen.view(-1)
        rows = hidden.repeat_interleave(self.top_k, dim=0)
        result = torch.empty_like(rows)
        for number in self.order:
            result = self.write(result, rows, flat == number, number)
        return (result.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    def write(self, result: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
        result[mask] = self.module_of(number)(rows[mask])
        return result


class OneExpert(MaskLoop):
    """Each token has the expert of its largest score."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.largest(self.router(hidden).softmax(dim=-1))
        result = torch.empty_like(hidden)
        for number in self.order:
            mask = chosen == number
            result[mask] = self.module_of(number)(hidden[mask]) * weights[mask].unsqueeze(-1)
        return result

    def largest(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and weights, both [tokens]."""
        weights, chosen = scores.max(dim=-1)
        return chosen, weights

"""Loops over the masks of experts on one device, as written by models of transformers 4 and of other projects.

Some loops use the indices of a mask, others the mask itself. Each expert is a module; its results are added up by
token. A module `Loop()` maps hidden states [tokens, HIDDEN] to [tokens, HIDDEN].
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 24, 4, 2


class GatedMlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(F.silu(self.w1(rows)) * self.w3(rows))
        return result


class MaskLoop(nn.Module):
    """A router, experts, and methods to add up results."""

    def __init__(self, hidden: int = HIDDEN, width: int = WIDTH, experts: int = EXPERTS, top_k: int = TOP_K) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(GatedMlp(hidden, width) for _ in range(experts))

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(range(len(self.experts)))

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expert ids and weights, both [tokens, k]."""
        weights = F.softmax(self.router(hidden), dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights.to(hidden.dtype)

    def module_of(self, number: int) -> nn.Module:
        return self.experts[number]

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)

    def add(self, result: torch.Tensor, number: int, rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return result.index_add_(0, token, rows.to(result.dtype))


class MixtralLoop(MaskLoop):
    """Mixtral and Qwen-MoE in transformers 4: a mask [experts, k, tokens]."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in self.order:
            choice, token = torch.where(mask[number])
            rows = hidden[None, token].reshape(-1, hidden.shape[-1])
            rows = self.module_of(number)(rows) * weights[token, choice, None]
            result = self.add(result, number, rows, token)
        return result


class NonzeroLoop(MaskLoop):
    """A mask [tokens, k, experts]; `nonzero` lists the pairs of each expert in one tensor."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).bool()
        for number in self.order:
            pairs = mask[:, :, number].nonzero()
            token, choice = pairs[:, 0], pairs[:, 1]
            rows = self.module_of(number)(hidden[token]) * weights[token, choice].unsqueeze(-1)
            result = self.add(result, number, rows, token)
        return result


class SelectedLoop(MaskLoop):
    """Mistral's reference code: ids are compared with each expert's, and rows are written back."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        for number in self.order:
            token, choice = torch.where(chosen == number)
            rows = weights[token, choice, None] * self.module_of(number)(hidden[token])
            result = self.add(result, number, rows, token)
        return result

    def add(self, result: torch.Tensor, number: int, rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        result[token] += rows
        return result


class AnyPlace(MaskLoop):
    """Rows are selected by a mask of tokens, and weights by the mask of all pairs."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        for number in self.order:
            pairs = chosen == number
            mask = pairs.any(dim=-1)
            result[mask] += self.module_of(number)(hidden[mask]) * weights[pairs].unsqueeze(-1)
        return result


class FlatPairs(MaskLoop):
    """DeepSeek's models in training mode: each pair is a row, and is overwritten by its expert's result."""

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
    """A loop in which each token has one expert."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(hidden).softmax(dim=-1).topk(1, dim=-1)
        weights, chosen = weights.squeeze(-1), chosen.squeeze(-1)
        result = torch.empty_like(hidden)
        for number in self.order:
            mask = chosen == number
            result[mask] = self.module_of(number)(hidden[mask]) * weights[mask].unsqueeze(-1)
        return result


class LastExpertStays(AnyPlace):
    """A loop that keeps the result of only the last of a token's experts."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, _ = self.route(hidden)
        result = self.start(hidden)
        for number in self.order:
            mask = (chosen == number).any(dim=-1)
            result[mask] = self.module_of(number)(hidden[mask])
        return result

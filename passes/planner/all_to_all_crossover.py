"""The number of tokens from which gathered weights are faster than exchanged tokens, for one graph and machine.

    gathered(n)   the slower of the computation and the transfers of all banks; over one slot, experts hide no transfer
    exchanged(n)  the computation, as much work on every rank, and what the blocks exchange; where all ranks have the
                  same tokens (AllReduce), gathering makes each compute what they shared out, and may never pay

Both grow with n, and `exchanged` is the longer one from the crossover on. Computation is that of the whole graph at the
reached rates, grouped GEMMs at theirs.
"""

from __future__ import annotations

import dataclasses

import sympy

from moepass.models.formulas.memory import element_bytes
from moepass.models.formulas.text import evaluate_text
from moepass.models.sizes.architecture import short_dtype
from moepass.passes.ir.plan import MoEBlock, Plan
from moepass.passes.machine.hardware import Hardware, with_ranks
from moepass.passes.machine.times import collective_seconds, gather_seconds, token_exchange_seconds, work_seconds

# Upper limit of the search for the crossover, in tokens per rank.
MOST_TOKENS = 1 << 24


@dataclasses.dataclass(frozen=True)
class FormSeconds:
    """Seconds of a run in both of its forms, and of the parts that they consist of."""

    gathered: float
    exchanged: float
    transfer: float
    exchange: float


class CrossoverEstimate:
    """Seconds of the runs of one graph, by tokens per rank.

    `plan` has costs, blocks with expert parallelism and their banks; `tokens` is the number of this rank's tokens in a
    block, in the graph's sizes. `ranks` share the experts. Raises InputError where `hardware` lacks a rate or link.
    """

    def __init__(
        self, plan: Plan, tokens: sympy.Expr, hardware: Hardware, ranks: int, slots: int = 2, transport: str = "pull"
    ) -> None:
        self.plan, self.slots = plan, slots
        self.hardware = with_ranks(hardware, ranks)
        self.sizes = {name: float(value) for name, value in plan.sizes}
        self.tokens = tokens
        self.blocks = [block for block in plan.blocks if block.parallel]
        self.dtype = short_dtype(self.blocks[0].dtype)
        # All ranks have the same tokens then, and each runs them through its own experts alone.
        self.are_tokens_shared = all(block.parallel == "all_reduce" for block in self.blocks)
        # Only what is linear in one size can be asked for other numbers of tokens.
        symbols = sorted(tokens.free_symbols, key=str)
        self.grows = next((one for one in symbols if tokens.diff(one).diff(one) == 0), None)
        self.captured_tokens = max(1.0, self._tokens_at(self.sizes))
        banks = [plan.bank(block.bank) for block in self.blocks if block.bank is not None]
        self.transfer = sum(
            gather_seconds(self.hardware, bank.format.link_bytes, bank.home, transport) for bank in banks
        )

    def seconds(self, tokens: float) -> FormSeconds:
        """Both forms with `tokens` tokens on every rank."""
        experts, others = self._computation(tokens)
        exchange = sum(exchange_seconds(self.hardware, block, tokens) for block in self.blocks)
        hiding = experts + others if self.slots > 1 else others
        gathered = max(hiding, self.transfer) + (0.0 if self.slots > 1 else experts)
        own_experts = experts / (self.hardware.ranks if self.are_tokens_shared else 1)
        return FormSeconds(gathered, own_experts + others + exchange, self.transfer, exchange)

    def crossover_tokens(self) -> int:
        """The least number of tokens per rank with which gathering takes no longer, up to `MOST_TOKENS`."""
        low, high = 0, MOST_TOKENS
        while high - low > 1:
            middle = (low + high) // 2
            both = self.seconds(middle)
            low, high = (low, middle) if both.gathered <= both.exchanged else (middle, high)
        return high

    def _computation(self, tokens: float) -> tuple[float, float]:
        """Seconds of grouped GEMMs, and of everything else."""
        scale, sizes = 1.0, self.sizes
        if self.grows is None:
            scale = tokens / self.captured_tokens
        else:
            per_size = self._tokens_at({**self.sizes, str(self.grows): 1.0})
            sizes = {**self.sizes, str(self.grows): tokens / max(per_size, 1e-9)}
        assert self.plan.cost is not None
        flops, memory, _ = self.plan.cost.at(sizes)
        experts = 0.0
        for block in self.blocks:
            if block.cost is None:
                continue
            block_flops, block_memory, _ = block.cost.at(sizes)
            experts += work_seconds(self.hardware, self.dtype, block_flops, block_memory, "grouped_gemm")
            flops, memory = flops - block_flops, memory - block_memory
        return scale * experts, scale * work_seconds(self.hardware, self.dtype, flops, memory)

    def _tokens_at(self, sizes: dict[str, float]) -> float:
        return evaluate_text(str(self.tokens), sizes)


def exchange_seconds(hardware: Hardware, block: MoEBlock, tokens: float) -> float:
    """What a block exchanges for `tokens` tokens of every rank."""
    row = block.hidden * element_bytes(short_dtype(block.dtype))
    ranks = hardware.ranks
    if block.parallel == "all_gather":
        rows = tokens * ranks * row
        return collective_seconds(hardware, "all_gather", rows) + collective_seconds(hardware, "reduce_scatter", rows)
    if block.parallel == "all_reduce":
        return collective_seconds(hardware, "all_reduce", tokens * row)
    return token_exchange_seconds(hardware, tokens * (block.top_k or 1) * row, block.experts)

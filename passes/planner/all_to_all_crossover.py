"""The smallest number of tokens at which gathering weights is faster than exchanging tokens, for a graph and a machine.

    gathered(n)   the longer of the computation and the transfers of all banks. With a single slot, experts hide no
                  transfer
    exchanged(n)  the computation, equal on all ranks, plus the exchanges of the blocks. If all ranks have the same
                  tokens (AllReduce), gathering repeats on each rank the work that they shared, and may never pay

Both grow with n, and `exchanged` is longer from the crossover on. Computation covers the whole graph at the reached
rates, with a separate rate for grouped GEMMs.
"""

from __future__ import annotations

import dataclasses

import sympy

from moepass.models.formulas.memory import element_bytes
from moepass.models.formulas.text import evaluate_text
from moepass.models.sizes.architecture import short_dtype
from moepass.passes.ir.plan import MoEBlock, Plan
from moepass.passes.machine.hardware import Hardware, with_ranks
from moepass.passes.machine.times import collective_seconds, fill_seconds, token_exchange_seconds, work_seconds

# Upper limit of the search for the crossover, in tokens per rank.
MOST_TOKENS = 1 << 24


@dataclasses.dataclass(frozen=True)
class FormSeconds:
    """Seconds of a run in both forms, and of its transfers and exchanges."""

    gathered: float
    exchanged: float
    transfer: float
    exchange: float


class CrossoverEstimate:
    """Seconds of the runs of one graph as a function of tokens per rank.

    Raises InputError if `hardware` lacks a rate or a link.

    Args:
        plan: The plan, with costs, blocks of expert parallelism and their banks.
        tokens: This rank's tokens in a block, as an expression in the graph's sizes.
        hardware: The machine.
        ranks: The number of ranks that share the experts.
        slots: Size of the ring.
        transport: How ranks exchange shards.
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
        # With AllReduce all ranks have the same tokens, and each runs only its own experts on them.
        self.are_tokens_shared = all(block.parallel == "all_reduce" for block in self.blocks)
        # Other numbers of tokens are reached by changing one size, in which `tokens` must be linear.
        symbols = sorted(tokens.free_symbols, key=str)
        self.grows = next((symbol for symbol in symbols if tokens.diff(symbol).diff(symbol) == 0), None)
        self.captured_tokens = max(1.0, self._tokens_at(self.sizes))
        banks = [plan.bank(block.bank) for block in self.blocks if block.bank is not None]
        self.transfer = sum(fill_seconds(self.hardware, bank.format, bank.home, transport) for bank in banks)

    def seconds(self, tokens: float) -> FormSeconds:
        """Return the seconds of both forms with `tokens` tokens on every rank."""
        experts, dense = self._computation(tokens)
        exchange = sum(exchange_seconds(self.hardware, block, tokens) for block in self.blocks)
        hiding = experts + dense if self.slots > 1 else dense
        gathered = max(hiding, self.transfer) + (0.0 if self.slots > 1 else experts)
        local_experts = experts / (self.hardware.ranks if self.are_tokens_shared else 1)
        return FormSeconds(gathered, local_experts + dense + exchange, self.transfer, exchange)

    def crossover_tokens(self) -> int:
        """Return the smallest number of tokens per rank, up to `MOST_TOKENS`, for which gathering is not slower."""
        low, high = 0, MOST_TOKENS
        while high - low > 1:
            middle = (low + high) // 2
            both = self.seconds(middle)
            low, high = (low, middle) if both.gathered <= both.exchanged else (middle, high)
        return high

    def _computation(self, tokens: float) -> tuple[float, float]:
        """Return the seconds of grouped GEMMs, and of all other operators."""
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
    """Return the seconds of a block's exchanges for `tokens` tokens on every rank."""
    row = block.hidden * element_bytes(short_dtype(block.dtype))
    ranks = hardware.ranks
    if block.parallel == "all_gather":
        rows = tokens * ranks * row
        return collective_seconds(hardware, "all_gather", rows) + collective_seconds(hardware, "reduce_scatter", rows)
    if block.parallel == "all_reduce":
        return collective_seconds(hardware, "all_reduce", tokens * row)
    return token_exchange_seconds(hardware, tokens * (block.top_k or 1) * row, block.experts)

"""Decisions and predictions of the planner for one model, as every plan carries them."""

from __future__ import annotations

import dataclasses

ASYNCEP, ALL_TO_ALL, RESIDENT = "asyncep", "all_to_all", "resident"
# The source of decisions that were made, or left open, without a hardware profile.
STRUCTURAL = "structural default"


@dataclasses.dataclass(frozen=True)
class FormRange:
    """The form of runs with at least `first_tokens` and fewer than `end_tokens` tokens per rank.

    Without `end_tokens` there is no upper limit.
    """

    form: str
    first_tokens: int = 1
    end_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device: resident weights (shards and resident banks), slots with staging buffers, and activations.

    `kv_bytes` counts cached keys and values.
    """

    resident_bytes: float
    slot_bytes: float
    activation_bytes: float
    kv_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        """Peak memory in bytes: the sum of weights, slots, activations, and cached keys and values."""
        return self.resident_bytes + self.slot_bytes + self.activation_bytes + self.kv_bytes


@dataclasses.dataclass(frozen=True)
class Decisions:
    """One schedule of a model's layers, for `batch` sequences of `sequence` tokens on each rank.

    Predictions are None if unknown. Seconds are for one step in the steady state.

    Attributes:
        profile: name of the machine; empty if there is no profile
        forms: which form (asyncep, all_to_all or resident) runs with how many tokens
        resident_layers: numbers of the layers whose experts stay on the device
        streamed_layers: numbers of all other layers, in the order in which their banks are copied
        slots, slot_bytes: size of the ring
        threshold_tokens: predicted smallest number of tokens per rank and step at which transfers are hidden
        memory: predicted memory of one device
        sources: the source of each field's value
    """

    home: str
    profile: str
    batch: int
    sequence: int
    forms: tuple[FormRange, ...]
    resident_layers: tuple[int, ...]
    streamed_layers: tuple[int, ...]
    slots: int
    slot_bytes: int
    memory_budget_bytes: float | None
    threshold_tokens: int | None
    step_seconds: float | None
    compute_seconds: float | None
    exposed_seconds: float | None
    memory: DeviceMemory | None
    sources: tuple[tuple[str, str], ...]

    @property
    def tokens(self) -> int:
        """Tokens of one rank and step; 0 if the plan is for no particular number."""
        return self.batch * self.sequence

    def source(self, field: str) -> str:
        """Return the source of the value of `field`. Raises KeyError for a field without a source."""
        return dict(self.sources)[field]

    def exchanged_below(self, crossover_tokens: int | None) -> Decisions:
        """Return the decisions of a model that exchanges tokens below `crossover_tokens` per rank, or always if None.

        Raises ValueError if no layer is streamed, so that nothing could be exchanged instead.
        """
        if not self.streamed_layers:
            raise ValueError("all layers are resident; tokens are exchanged instead of streaming banks")
        if crossover_tokens is None:
            forms: tuple[FormRange, ...] = (FormRange(ALL_TO_ALL),)
        elif crossover_tokens <= 1:
            forms = (FormRange(ASYNCEP),)
        else:
            forms = (FormRange(ALL_TO_ALL, 1, crossover_tokens), FormRange(ASYNCEP, crossover_tokens))
        return dataclasses.replace(self, forms=forms)

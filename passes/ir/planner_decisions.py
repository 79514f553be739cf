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
    """Bytes on one device, part by part. Only servers cache keys and values, and run steps over a trie.

    Attributes:
        resident_bytes: weights that stay on the device: dense weights, shards and resident banks
        slot_bytes: slots, buffers from which encoded banks are decoded, and staging buffers
        activation_bytes: activations of the layers of a step
        kv_bytes: the cache of keys and values
        attention_bytes: temporaries of attention over a trie, at the same time as the activations
        logits_bytes: logits of a step and their scores, after its layers
    """

    resident_bytes: float
    slot_bytes: float
    activation_bytes: float
    kv_bytes: float = 0.0
    attention_bytes: float = 0.0
    logits_bytes: float = 0.0

    @property
    def step_bytes(self) -> float:
        """The most bytes that a step takes at once: in its layers, or for its logits."""
        return max(self.activation_bytes + self.attention_bytes, self.logits_bytes)

    @property
    def peak_bytes(self) -> float:
        """Peak memory in bytes: the sum of weights, slots, a step, and cached keys and values."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the sum, by name."""
        return {
            "weights": self.resident_bytes,
            "slots": self.slot_bytes,
            "step": self.step_bytes,
            "cache": self.kv_bytes,
        }

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {nbytes / 1e9:.3g}" for name, nbytes in self.parts.items())
        return f"{self.peak_bytes / 1e9:.3g} GB ({parts})"


NO_MEMORY = DeviceMemory(0.0, 0.0, 0.0)


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

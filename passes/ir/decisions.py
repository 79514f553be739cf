"""The planner's decisions for one model and its predictions: the record that every plan carries."""

from __future__ import annotations

import dataclasses

ASYNCEP, ALL_TO_ALL, RESIDENT = "asyncep", "all_to_all", "resident"
# The source of what was decided or left open without knowing the machine.
STRUCTURAL = "structural default"


@dataclasses.dataclass(frozen=True)
class FormRange:
    """The form of runs with `first_tokens` tokens per rank or more, and fewer than `end_tokens`; None: no end."""

    form: str
    first_tokens: int = 1
    end_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device: weights that stay (shards, resident banks), slots and staging buffers, activations."""

    resident_bytes: float
    slot_bytes: float
    activation_bytes: float
    kv_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return self.resident_bytes + self.slot_bytes + self.activation_bytes + self.kv_bytes


@dataclasses.dataclass(frozen=True)
class Decisions:
    """One schedule of a model's layers, for `batch` sequences of `sequence` tokens on each rank.

    What was decided:

    forms             which form runs with how many tokens take: asyncep, all_to_all or resident
    resident_layers   layers whose experts stay on the device, by number
    streamed_layers   the others, in the order in which their banks are copied
    slots, slot_bytes of the ring

    What is predicted, None where it is not known: `threshold_tokens` are the tokens per rank and step from which on
    transfers are hidden; seconds are those of one step in the steady state; `memory` is that of one device.

    `sources` says of each of these fields where its value comes from, `profile` is the machine's name (empty: none).
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
        """The source of the value of `field`. Raises KeyError for a field that has no source."""
        return dict(self.sources)[field]

    def exchanged_below(self, crossover_tokens: int | None) -> Decisions:
        """The same, for a model that has another form: tokens are exchanged below that number per rank; None: always.

        Raises ValueError where nothing is streamed, so that there is nothing to exchange instead.
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

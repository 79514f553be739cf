"""Layers whose experts stay on the device: the first layers that fit into a number of bytes, or named layers."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from moepass.models.errors import InputError, OptionError, one_of
from moepass.models.limits import MOST_LAYERS


@dataclasses.dataclass(frozen=True)
class Residents:
    """The first layers whose experts fit into `nbytes` together, or `layers` by the numbers in their modules' paths.

    Raises OptionError if `nbytes` or `layers` is not a number of bytes or a list of layers, or if both are set.
    """

    nbytes: int = 0
    layers: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not is_count(self.nbytes):
            raise OptionError.wrong("resident_bytes", self.nbytes, "a number of bytes from 0 on")
        if isinstance(self.layers, Sequence) and len(self.layers) > MOST_LAYERS:
            text = (
                f"resident_layers names {len(self.layers)} layers; the limit is {MOST_LAYERS}, as for layers of a model"
            )
            raise OptionError(text, name="resident_layers", value=len(self.layers), expected=MOST_LAYERS)
        if not isinstance(self.layers, Sequence) or not all(is_count(layer) for layer in self.layers):
            expected = "a list of layer numbers from 0 on, as moepass explain lists them in schedule.resident_layers"
            raise OptionError.wrong("resident_layers", self.layers, expected)
        if self.nbytes and self.layers:
            text = f"resident_bytes is {self.nbytes} and resident_layers is {list(self.layers)}; give one of them"
            raise OptionError(text, name="resident_bytes", value=self.nbytes)

    def among(self, bank_bytes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the paths of the banks that stay on the device. `bank_bytes` has the bytes of every bank, by path.

        Raises InputError if a layer has no bank.
        """
        if not self.layers:
            ends = itertools.accumulate(bank_bytes.values())
            return tuple(path for path, end in zip(bank_bytes, ends, strict=True) if end <= self.nbytes)
        stay = tuple(path for path in bank_bytes if not _numbers(path).isdisjoint(self.layers))
        missing = sorted(set(self.layers) - {number for path in stay for number in _numbers(path)})
        if missing:
            text = (
                f"resident_layers has {one_of(missing)}, but no module with experts has that number in its path; "
                f"their paths are {one_of(bank_bytes) or 'none'}"
            )
            raise InputError(text, name="resident_layers", value=missing, expected=tuple(bank_bytes))
        return stay

    @property
    def is_given(self) -> bool:
        """True if the user has chosen layers."""
        return bool(self.nbytes or self.layers)

    def __str__(self) -> str:
        return f"resident_layers is {list(self.layers)}" if self.layers else f"resident_bytes is {self.nbytes}"

    def all_resident_error(self, layers: int) -> InputError:
        """Return the error for a choice that keeps all `layers` layers on the device."""
        advice = "do not offload the model, or keep fewer layers"
        if self.layers:
            reason = f"resident_layers names all {layers} layers with experts"
            return InputError(f"{reason}; {advice}", name="resident_layers", value=self.layers)
        reason = f"{self}, and the experts of all {layers} layers fit into it"
        return InputError(f"{reason}; {advice}", name="resident_bytes", value=self.nbytes)


def is_count(value: object, least: int = 0) -> bool:
    """Return whether `value` is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _numbers(path: str) -> set[int]:
    return {int(number) for number in re.findall(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", path)}

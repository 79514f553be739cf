"""Which layers keep their experts: as many of the first as fit into some bytes, or those that a plan names."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from moepass.models.errors import InputError, OptionError, one_of
from moepass.models.limits import MOST_LAYERS


@dataclasses.dataclass(frozen=True)
class Residents:
    """The first layers whose experts fit into `nbytes` together, or `layers` by the numbers in their modules' paths, or
    what a plan decided: `paths`.

    Raises OptionError for what is no number of bytes or layer, and for both at once.
    """

    nbytes: int = 0
    layers: Sequence[int] = ()
    paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_count(self.nbytes):
            raise OptionError.wrong("resident_bytes", self.nbytes, "a number of bytes from 0 on")
        if isinstance(self.layers, Sequence) and len(self.layers) > MOST_LAYERS:
            raise OptionError(
                f"resident_layers names {len(self.layers)} layers; the limit is {MOST_LAYERS}, as for layers of a "
                "model",
                name="resident_layers",
                value=len(self.layers),
                expected=MOST_LAYERS,
            )
        if not isinstance(self.layers, Sequence) or not all(_is_count(layer) for layer in self.layers):
            expected = "a list of layer numbers from 0 on, as moepass explain gives them in schedule.resident_layers"
            raise OptionError.wrong("resident_layers", self.layers, expected)
        if self.nbytes and self.layers:
            raise OptionError(
                f"resident_bytes is {self.nbytes} and resident_layers is {list(self.layers)}; give one of them",
                name="resident_bytes",
                value=self.nbytes,
            )

    def among(self, bank_bytes: Mapping[str, int]) -> tuple[str, ...]:
        """The paths that stay, of banks that are given by path, in the model's order.

        Raises InputError where a layer has no bank.
        """
        if self.paths:
            return tuple(path for path in bank_bytes if path in self.paths)
        if not self.layers:
            ends = itertools.accumulate(bank_bytes.values())
            return tuple(path for path, end in zip(bank_bytes, ends, strict=True) if end <= self.nbytes)
        found = tuple(path for path in bank_bytes if not _numbers(path).isdisjoint(self.layers))
        missing = sorted(set(self.layers) - {number for path in found for number in _numbers(path)})
        if missing:
            raise InputError(
                f"resident_layers has {one_of(missing)}, but no module with experts has that number in its path; "
                f"their paths are {one_of(bank_bytes) or 'none'}",
                name="resident_layers",
                value=missing,
                expected=tuple(bank_bytes),
            )
        return found

    @property
    def is_given(self) -> bool:
        return bool(self.nbytes or self.layers)

    def __str__(self) -> str:
        return f"resident_layers is {list(self.layers)}" if self.layers else f"resident_bytes is {self.nbytes}"

    def complaint(self, layers: int) -> InputError:
        """That all `layers` would stay."""
        name, value = ("resident_layers", self.layers) if self.layers else ("resident_bytes", self.nbytes)
        if self.layers:
            what = f"resident_layers names all {layers} layers with experts"
        else:
            what = f"resident_bytes is {self.nbytes}, into which the experts of all {layers} layers fit"
        return InputError(f"{what}; leave the model as it is, or give less", name=name, value=value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _numbers(path: str) -> set[int]:
    return {int(number) for number in re.findall(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", path)}

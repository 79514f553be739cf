"""The planner's choice of the layers that stay on the device and of the number of slots for the others.

The planner gets the model's weights by shape and dtype, and its config if a formula covers the family. The profile of
the machine is the one in the options, or else the one that `moepass calibrate` has stored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moepass.models.byte_counts import parse_bytes
from moepass.models.errors import InputError, OptionError
from moepass.models.formulas.expert_placement import largest_shard_bytes, smallest_shard_bytes
from moepass.models.formulas.memory import bank_bytes
from moepass.models.homes import COLLECTIVE, home_named
from moepass.models.limits import MOST_TOKENS, check_limit
from moepass.models.sizes.architecture import Architecture, Layer, short_dtype
from moepass.models.sizes.families import from_config
from moepass.passes.ir.placed_model import PlacedModel
from moepass.passes.ir.planner_decisions import DeviceMemory
from moepass.passes.machine.hardware import Hardware, with_emulated_link, with_ranks
from moepass.passes.machine.layer_times import Sequences
from moepass.passes.machine.times import gather_seconds, peak_flops_per_s
from moepass.passes.planner.graph_problem import bank_phases, layer_numbers, memory_source
from moepass.passes.planner.make_plan import DEFAULT_SLOTS, NO_PROFILE, MadePlan, PlanningProblem, make_plan
from moepass.passes.planner.model_problem import model_problem, resting_bytes
from moepass.passes.planner.schedule_search import BudgetError
from moepass.passes.planner.simulate import ExecutionModel
from moepass.passes.planner.strategies import Setting, activations_bytes, peak_activation_bytes
from moepass.runtime.homes.options.home_options import BankRoute
from moepass.runtime.offload.residents import Residents
from moepass.runtime.profiles.hardware_profiles import load_hardware, profile_json
from moepass.runtime.profiles.stored_profiles import calibrate_command, stored_profile
from moepass.runtime.ranks.agree import Topic

logger = logging.getLogger("moepass")

# The default step to plan for: the number of sequences, and the tokens of each.
DEFAULT_TOKENS = (1, 4096)

Experts = Mapping[str, Mapping[str, nn.Parameter]]


@dataclasses.dataclass(frozen=True)
class PlanningOptions:
    """The user's planning options.

    Attributes:
        memory_budget: bytes of the device's memory, as a number or as text.
        hardware: the machine, a preset or a profile.
        tokens: the tokens of a step, or the number of sequences and the tokens of each.
        slots: the number of slots, by default the planner's choice.
        residents: the layers that stay; by default the planner's choice.
    """

    memory_budget: str | float | None = None
    hardware: str | os.PathLike[str] | Hardware | None = None
    tokens: int | tuple[int, int] | None = None
    slots: int | None = None
    residents: Residents = dataclasses.field(default_factory=Residents)

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget in bytes; None without one. Raises OptionError for a wrong number or text."""
        budget = self.memory_budget
        if budget is None:
            return None
        wrong = OptionError.wrong("memory_budget", budget, "bytes above 0, such as 6e9, '6GB' or '512MiB'")
        try:
            number = parse_bytes(budget) if isinstance(budget, str) else budget
        except InputError as error:
            raise wrong from error
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 < number < math.inf:
            raise wrong
        return int(number)

    @property
    def sequences(self) -> Sequences:
        """The sequences of a step to plan for. Raises OptionError for wrong numbers."""
        tokens = DEFAULT_TOKENS if self.tokens is None else self.tokens
        counts = (1, tokens) if isinstance(tokens, int) else tokens
        if (
            not isinstance(counts, Sequence)
            or len(counts) != 2
            or not all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in counts)
        ):
            expected = (
                "a number of tokens of at least 1, or a pair: the number of sequences in a step, and the tokens of each"
            )
            raise OptionError.wrong("tokens", self.tokens, expected)
        check_limit("tokens", counts[0] * counts[1], MOST_TOKENS, "share the sequences out over several steps")
        return Sequences(*counts)

    def machine(self, device: torch.device, ranks: int) -> Hardware | None:
        """Return the profile in the options, or else the stored one of this machine; None if there is no profile.

        Raises OptionError for a wrong type, and InputError for an unknown machine.
        """
        if self.hardware is None:
            return stored_profile(device, ranks)
        if isinstance(self.hardware, Hardware):
            return self.hardware
        if isinstance(self.hardware, (str, os.PathLike)):
            return load_hardware(self.hardware)
        expected = "a preset such as 8xh100-80g, the file of a profile, or None"
        raise OptionError.wrong("hardware", self.hardware, expected)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The layers that stay resident, and the ring for the others.

    Attributes:
        residents: the layers that stay as they are.
        slots: the number of slots that the others stream through.
        placed: the decisions, for the plans of graphs.
        topics: the causes of the decision, which tell ranks why theirs differ.
    """

    residents: Residents
    slots: int
    placed: PlacedModel
    topics: tuple[Topic, ...]


def place(
    model: nn.Module,
    experts: Experts,
    planning: PlanningOptions,
    route: BankRoute,
) -> Placement:
    """Decide which layers stay and how many slots there are, unless `planning` says so.

    Args:
        model: the model.
        experts: the expert weights of each bank, by path.
        planning: the user's planning options.
        route: the route of banks to the compute device.

    Raises:
        OptionError: there is both a budget and residents, or an error of `PlanningOptions`.
        InputError: the budget is too small (the error names the least that suffices), or the profile lacks a link or
            rate.
    """
    residents, slots = planning.residents, planning.slots
    # Both are read first, so that wrong values raise even where the plan does not need them.
    budget, _ = planning.budget_bytes, planning.sequences
    if budget is not None and residents.is_given:
        raise OptionError(
            f"memory_budget is {planning.memory_budget!r}, and {residents}: the plan decides which layers stay; "
            "give one of the two",
            name="memory_budget",
            value=planning.memory_budget,
        )
    inputs = _PlanningInputs.of(model, experts, planning, route)
    stay = residents.among(inputs.bank_bytes) if residents.is_given else None
    made = inputs.plan(stay, slots)
    by_number = {number: path for path, number in inputs.numbers.items()}
    paths = tuple(by_number[number] for number in made.decisions.resident_layers)
    streamed = tuple((path, number) for path, number in inputs.numbers.items() if path not in paths)
    placed = PlacedModel(
        made.decisions,
        streamed,
        inputs.weights(),
        made.schedule.resident_bytes + made.schedule.shard_bytes,
        inputs.dtype,
        inputs.architecture,
        inputs.hardware,
        route.transport,
        inputs.unknown,
    )
    topics = tuple(_topics(planning, inputs.hardware))
    if slots is None:
        # The ring itself limits its slots to the number of banks; more banks may be added later.
        slots = DEFAULT_SLOTS if budget is None else max(1, made.decisions.slots)
    return Placement(Residents(paths=paths), slots, placed, topics)


def _topics(planning: PlanningOptions, hardware: Hardware | None) -> Iterator[Topic]:
    """Yield the causes of the placement, from cause to effect. Without a budget these are only the residents."""
    budget, sequences = planning.budget_bytes, planning.sequences
    machine = None
    if hardware is not None:
        machine = f"{hardware.name} ({hashlib.blake2b(profile_json(hardware), digest_size=8).hexdigest()})"
    yield Topic("memory_budget in bytes", budget, "give every rank the same memory_budget")
    decided = {
        "tokens": ([sequences.count, sequences.length], "tokens"),
        "slots": (planning.slots, "slots"),
        "the hardware profile (its name and a digest)": (machine, "hardware, as a preset or one profile's file"),
    }
    for name, (value, same) in decided.items():
        yield Topic(name, None if budget is None else value, f"give every rank the same {same}")
    yield Topic("resident_bytes", planning.residents.nbytes, "give every rank the same resident_bytes")
    yield Topic("resident_layers", sorted(planning.residents.layers), "give every rank the same resident_layers")


@dataclasses.dataclass(frozen=True)
class _PlanningInputs:
    """The model's sizes and the machine, as far as they are known.

    Attributes:
        planning: the user's planning options.
        route: the route of banks to the compute device.
        bank_bytes: bytes of each complete bank, by path.
        shard_bytes: bytes of the largest shard of each bank.
        read_in_place_bytes: bytes of the smallest shard that kernels may read without a copy in the slot.
        numbers: the number of each bank's layer.
        dense_bytes: bytes of all other parameters and buffers.
        dtype: the dtype of the expert weights.
        architecture: the model's sizes; None if no formula knows them.
        hardware: the machine's profile; None without a stored one.
        unknown: why the architecture or the hardware is missing.
    """

    planning: PlanningOptions
    route: BankRoute
    bank_bytes: dict[str, int]
    shard_bytes: dict[str, int]
    read_in_place_bytes: dict[str, int]
    numbers: dict[str, int]
    dense_bytes: int
    dtype: str
    architecture: Architecture | None
    hardware: Hardware | None
    unknown: str

    @staticmethod
    def of(model: nn.Module, experts: Experts, planning: PlanningOptions, route: BankRoute) -> _PlanningInputs:
        banks = {path: sum(value.nbytes for value in values.values()) for path, values in experts.items()}
        counts = {path: next(iter(values.values())).shape[0] for path, values in experts.items()}
        shards = {path: largest_shard_bytes(nbytes, counts[path], route.ranks) for path, nbytes in banks.items()}
        in_place = {
            path: smallest_shard_bytes(_weight_bytes(values.values()), counts[path], route.ranks)
            for path, values in experts.items()
        }
        numbers = layer_numbers(banks)
        if len(set(numbers.values())) < len(numbers):  # several banks in one layer
            numbers = {path: index for index, path in enumerate(banks)}
        in_banks = {id(value) for values in experts.values() for value in values.values()}
        all_bytes = {id(value): value.nbytes for value in (*model.parameters(), *model.buffers())}
        dense = sum(nbytes for key, nbytes in all_bytes.items() if key not in in_banks)
        dtype = _dtype_of(experts)
        hardware, unknown = _machine(planning, route, dtype)
        architecture = None
        if hardware is not None or planning.budget_bytes is not None:
            architecture, why = _architecture(model, experts, numbers, dtype)
            unknown = unknown or why
        return _PlanningInputs(
            planning, route, banks, shards, in_place, numbers, dense, dtype, architecture, hardware, unknown
        )

    def weights(self) -> DeviceMemory:
        """Return the bytes on the device under every decision, without activations."""
        return resting_bytes(self.dense_bytes, self.shard_bytes.values(), self.route.staging_buffers)

    def plan(self, stay: tuple[str, ...] | None, slots: int | None) -> MadePlan:
        """Choose the layers that stay resident and the number of slots, unless `stay` or `slots` sets them."""
        if self.hardware is not None and self.architecture is not None:
            return self._made(self._by_sizes(self.hardware, self.architecture, stay, slots))
        return self._made(self._by_bytes(stay, slots))

    def _by_sizes(
        self, hardware: Hardware, architecture: Architecture, stay: tuple[str, ...] | None, slots: int | None
    ) -> PlanningProblem:
        budget = self.planning.budget_bytes
        setting = Setting(
            architecture,
            hardware,
            self.planning.sequences,
            self.dtype,
            math.inf if budget is None else budget,
            transport=self.route.transport,
        )
        return model_problem(
            setting,
            self.route.home,
            slots=slots,
            resident_layers=None if stay is None else tuple(self.numbers[path] for path in stay),
            resting=dataclasses.replace(self.weights(), activation_bytes=activations_bytes(setting)),
        )

    def _by_bytes(self, stay: tuple[str, ...] | None, slots: int | None) -> PlanningProblem:
        """Return the problem without times. Activations are left out if no formula knows the model."""
        sequences = self.planning.sequences
        weights = self.weights()
        if self.architecture is not None:
            activations = peak_activation_bytes(self.architecture, sequences.tokens, self.dtype)
            weights = dataclasses.replace(weights, activation_bytes=activations)
        has_shards = home_named(self.route.home).keeps_shards_on_device
        shards, in_place = (self.shard_bytes, self.read_in_place_bytes) if has_shards else ({}, {})
        phases = bank_phases(self.bank_bytes.items(), self.numbers, shards, in_place)
        resident = None if stay is None else tuple(index for index, phase in enumerate(phases) if phase.name in stay)
        budget = self.planning.budget_bytes
        return PlanningProblem(
            phases=phases,
            home=self.route.home,
            resting=weights,
            batch=sequences.count,
            sequence=sequences.length,
            machine=ExecutionModel(fills_ahead=self.route.transport != COLLECTIVE),
            budget_bytes=None if budget is None else float(budget),
            resident=resident,
            slots=slots,
            unknown=self.unknown,
            memory_source=memory_source(self.architecture is not None),
        )

    def _made(self, problem: PlanningProblem) -> MadePlan:
        try:
            return make_plan(problem)
        except BudgetError as error:
            assert problem.resting is not None
            resting = problem.resting
            enough_bytes = math.ceil(resting.peak_bytes) + error.needed_bytes
            raise InputError(
                f"memory_budget is {self.planning.memory_budget!r}, which is too small: dense weights and staging "
                f"buffers take {resting.resident_bytes + resting.slot_bytes:.0f} bytes, activations of {problem.batch} "
                f"sequences of {problem.sequence} tokens {resting.activation_bytes:.0f}, and slots and shards "
                f"{error.needed_bytes}; use at least {enough_bytes} bytes, or fewer tokens",
                name="memory_budget",
                value=self.planning.memory_budget,
                expected=enough_bytes,
            ) from error


def _weight_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of matrices, which grouped GEMMs may read from the shard; slots always contain the biases."""
    return sum(value.nbytes for value in tensors if value.dim() == 3)


def _machine(planning: PlanningOptions, route: BankRoute, dtype: str) -> tuple[Hardware | None, str]:
    """Return the profile with this model's ranks and emulated links; or None and the reason.

    Raises InputError if the profile in the options has no link from the home, or no rate for `dtype`.
    """
    command = calibrate_command(route.device, route.ranks)
    try:
        hardware = planning.machine(route.device, route.ranks)
    except InputError as error:
        if planning.hardware is not None:
            raise
        # The user did not choose this stored profile, so a damaged or outdated one is no error.
        unknown = f"the stored profile of this machine is not used: {error}; {command} stores another one"
        logger.warning("%s", unknown)
        return None, unknown
    if hardware is None:
        return None, f"{NO_PROFILE}; {command} makes one"
    hardware = with_ranks(hardware, route.ranks)
    for link, rate in route.links.items():
        hardware = with_emulated_link(hardware, rate, (link,))
    try:
        gather_seconds(hardware, 1.0, route.home, route.transport)
        if dtype:
            peak_flops_per_s(hardware, dtype)
    except InputError as error:
        if planning.hardware is not None:
            raise
        return None, str(error)  # the stored profile is no error, see above
    return hardware, ""


def _dtype_of(experts: Experts) -> str:
    """Return the short name of the expert weights' dtype, or torch's name if formulas do not know it."""
    value = next((value for values in experts.values() for value in values.values()), None)
    if value is None:
        return ""
    try:
        return short_dtype(value.dtype)
    except InputError:
        return str(value.dtype).removeprefix("torch.")


def _architecture(
    model: nn.Module, experts: Experts, numbers: Mapping[str, int], dtype: str
) -> tuple[Architecture | None, str]:
    """Return the model's sizes, attention by its config and experts as they are; or None and the reason.

    Layers may have been changed since the config was written: fewer experts in some, or narrower ones.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None, f"the sizes of {type(model).__name__} are not known, because it has no transformers config"
    try:
        read = from_config(config, dtype=dtype or None)
    except InputError as error:
        return None, str(error)
    layers = list(read.layers)
    for path, values in experts.items():
        number = numbers[path]
        changed = _with_experts(model, path, values, layers[number], read) if number < len(layers) else None
        if changed is None:
            return None, f"the experts of {path} do not have the sizes that the model's config gives layer {number}"
        layers[number] = changed
    missing = set(read.moe_layers) - set(numbers.values())
    if missing:
        return None, f"layer {min(missing)} has experts by the model's config, and none in the model"
    return dataclasses.replace(read, layers=tuple(layers)), ""


def _with_experts(
    model: nn.Module, path: str, values: Mapping[str, nn.Parameter], layer: Layer, read: Architecture
) -> Layer | None:
    """Return `layer` with the width and number of the actual experts; None if their bytes do not fit any."""
    if layer.experts is None:
        return None
    nbytes = sum(value.nbytes for value in values.values())
    matrices = [value for value in values.values() if value.dim() == 3]
    count, experts = matrices[0].shape[0], layer.experts
    weights = sum(math.prod(value.shape[1:]) for value in matrices)
    width = weights // (read.hidden * (3 if experts.gated else 2))
    top_k = min(count, _top_k(model.get_submodule(path.rpartition(".")[0]), experts.top_k))
    actual = dataclasses.replace(experts, count=count, width=width, top_k=top_k)
    fits = bank_bytes(actual, read.hidden, read.dtype) == nbytes
    return dataclasses.replace(layer, experts=actual) if fits else None


def _top_k(block: nn.Module, default: int) -> int:
    """Return the number of experts of each token, as the block's router has it."""
    values = [getattr(module, "top_k", None) for module in block.modules()]
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), default)

"""The planner's choice of the layers that stay on the device and of the number of slots for the others.

The planner gets the model's weights by shape and dtype, and its config if a formula covers the family.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moepass.models.byte_counts import parse_bytes
from moepass.models.errors import InputError, OptionError
from moepass.models.formulas.expert_placement import largest_shard_bytes, smallest_shard_bytes
from moepass.models.formulas.memory import bank_bytes
from moepass.models.formulas.stored_weights import BankSizes
from moepass.models.homes import COLLECTIVE, home_named
from moepass.models.limits import FP8, MODEL, MOST_TOKENS, check_limit
from moepass.models.sizes.architecture import Architecture, Layer, short_dtype
from moepass.models.sizes.families import from_config
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.placed_model import PlacedModel
from moepass.passes.ir.planner_decisions import DeviceMemory
from moepass.passes.ir.shards import in_fp8
from moepass.passes.machine.hardware import Hardware, with_emulated_link, with_ranks
from moepass.passes.machine.layer_times import Sequences
from moepass.passes.machine.times import gather_seconds, peak_flops_per_s
from moepass.passes.planner.graph_problem import bank_phases, layer_numbers, memory_source
from moepass.passes.planner.make_plan import DEFAULT_SLOTS, NO_PROFILE, MadePlan, PlanningProblem, make_plan
from moepass.passes.planner.model_problem import model_problem, resting_bytes
from moepass.passes.planner.schedule_search import BudgetError
from moepass.passes.planner.simulate import ExecutionModel
from moepass.passes.planner.strategies import Setting, activations_bytes, peak_activation_bytes
from moepass.runtime.banks.banks import describe_bank
from moepass.runtime.homes.options.home_options import HomeOptions
from moepass.runtime.offload.pack_experts import Banks
from moepass.runtime.offload.residents import Residents, is_count
from moepass.runtime.profiles.hardware_profiles import load_hardware, profile_json
from moepass.runtime.profiles.stored_profiles import calibrate_command, stored_profile
from moepass.runtime.ranks.agree import Topic

logger = logging.getLogger("moepass")

# The default step to plan for: the number of sequences, and the tokens of each.
DEFAULT_TOKENS = (1, 4096)

Experts = Mapping[str, Mapping[str, nn.Parameter]]
# Returns the memory of a server beside its weights, from the tokens of a step and the dtype of weights. Without an
# architecture, only the cache is known.
ServingMemory = Callable[[Architecture | None, int, str], DeviceMemory]


@dataclasses.dataclass(frozen=True)
class PlanningOptions:
    """The user's planning options, as `offload_experts` describes them.

    Attributes:
        serving_memory: the memory of a server, of which the budget must leave as much; None if nothing is served.
        device_bytes: memory of the device that this process may take; None if unlimited.
    """

    memory_budget: str | float | None = None
    hardware: str | os.PathLike[str] | Hardware | None = None
    tokens: int | tuple[int, int] | None = None
    slots: int | None = None
    residents: Residents = dataclasses.field(default_factory=Residents)
    experts_compute: str = MODEL
    serving_memory: ServingMemory | None = None
    device_bytes: int | None = None

    @property
    def multiplies_in_fp8(self) -> bool:
        """True if experts stay FP8 in their slots. Raises OptionError for an unknown `experts_compute`."""
        if self.experts_compute not in (MODEL, FP8):
            raise OptionError.wrong("experts_compute", self.experts_compute, f"{MODEL!r} or {FP8!r}")
        return self.experts_compute == FP8

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
        is_pair = isinstance(counts, Sequence) and len(counts) == 2
        if not is_pair or not all(is_count(count, 1) for count in counts):
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
    """The result of `place`.

    Attributes:
        resident: paths of the layers whose experts stay on the device.
        slots: number of slots through which the experts of all other layers stream.
        topics: the settings that determine the placement. Ranks compare them, and an error names the first difference.
    """

    resident: tuple[str, ...]
    slots: int
    placed: PlacedModel
    topics: tuple[Topic, ...]


def place(
    model: nn.Module,
    experts: Experts,
    planning: PlanningOptions,
    options: HomeOptions,
    device: torch.device,
    packed: Banks,
) -> Placement:
    """Decide which layers stay and how many slots there are, where `planning` leaves this open.

    `experts` are the expert weights of each bank, by path; those in `packed` rest in that form. With experts in FP8 no
    layer stays, because resident experts would compute in the model's dtype. Raises OptionError if there is both a
    budget and residents, or for wrong `PlanningOptions`, and InputError if the budget is too small (the error names the
    smallest sufficient budget) or the device is, or the profile lacks a link or rate.
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
    if planning.multiplies_in_fp8 and residents.is_given:
        text = (
            f"experts_compute is {FP8!r}, and {residents}: resident experts would compute in the model's dtype; give "
            "one of the two"
        )
        raise OptionError(text, name="experts_compute", value=FP8, expected=MODEL)
    inputs = _PlanningInputs(model, experts, planning, options, device, packed)
    stay = residents.among(inputs.bank_bytes) if residents.is_given else None
    if options.home == "device":
        if budget is not None:
            text = (
                f"memory_budget is {planning.memory_budget!r}, but with home='device' all experts are on the device; "
                "leave the budget out, or choose another home"
            )
            raise OptionError(text, name="memory_budget", value=planning.memory_budget)
        stay = tuple(path for path, bank in inputs.sizes.items() if path in (stay or ()) or not bank.is_encoded)
    if planning.multiplies_in_fp8:
        stay = ()
    made = inputs.plan(stay, slots)
    _check_device(made, planning, options)
    resident = tuple(path for path, number in inputs.numbers.items() if number in made.decisions.resident_layers)
    streamed = tuple((path, number) for path, number in inputs.numbers.items() if path not in resident)
    placed = PlacedModel(
        made.decisions,
        streamed,
        inputs.weights(),
        made.schedule.resident_bytes + made.schedule.shard_bytes,
        inputs.dtype,
        inputs.architecture,
        inputs.hardware,
        options.transport,
        inputs.unknown,
    )
    if slots is None:
        # The ring itself limits its slots to the number of banks; more banks may be added later.
        slots = DEFAULT_SLOTS if budget is None else max(1, made.decisions.slots)
    return Placement(resident, slots, placed, _topics(planning, inputs.hardware))


def _topics(planning: PlanningOptions, hardware: Hardware | None) -> tuple[Topic, ...]:
    """Return the causes of the placement, from cause to effect. Without a budget these are only the residents."""
    budget, sequences = planning.budget_bytes, planning.sequences
    machine = None
    if hardware is not None:
        machine = f"{hardware.name} ({hashlib.blake2b(profile_json(hardware), digest_size=8).hexdigest()})"
    machine_remedy = "hardware, as a preset or one profile's file"
    rows = (
        ("memory_budget in bytes", budget, "memory_budget"),
        ("tokens", budget and [sequences.count, sequences.length], "tokens"),
        ("slots", budget and planning.slots, "slots"),
        ("experts_compute", planning.experts_compute, "experts_compute"),
        ("the hardware profile (its name and a digest)", budget and machine, machine_remedy),
        ("resident_bytes", planning.residents.nbytes, "resident_bytes"),
        ("resident_layers", sorted(planning.residents.layers), "resident_layers"),
    )
    return tuple(Topic(name, value, f"give every rank the same {remedy}") for name, value, remedy in rows)


class _PlanningInputs:
    """The model's sizes and the machine, as far as they are known."""

    def __init__(
        self,
        model: nn.Module,
        experts: Experts,
        planning: PlanningOptions,
        options: HomeOptions,
        device: torch.device,
        packed: Banks,
    ) -> None:
        self.planning, self.options = planning, options
        # Bytes by path of each complete bank in a slot, and of its largest shard at rest.
        self.bank_bytes = {path: sum(value.nbytes for value in values.values()) for path, values in experts.items()}
        counts = {path: next(iter(values.values())).shape[0] for path, values in experts.items()}
        resting = {**experts, **packed}
        specs = {path: describe_bank(0, path, values, home=options.home) for path, values in resting.items()}
        if planning.multiplies_in_fp8:
            specs = {path: in_fp8(spec) for path, spec in specs.items()}
        self.sizes: dict[str, BankSizes] = {
            path: spec.format if spec.format.is_encoded else BankFormat.plain(self.bank_bytes[path])
            for path, spec in specs.items()
        }
        self.shard_bytes = {
            path: largest_shard_bytes(sizes.home_bytes, counts[path], options.ranks)
            for path, sizes in self.sizes.items()
        }
        # Bytes of the smallest shard of matrices, which grouped GEMMs may read in place; slots always contain biases.
        matrix_bytes = {
            path: sum(value.nbytes for value in values.values() if value.dim() == 3) for path, values in experts.items()
        }
        self.read_in_place_bytes = {
            path: smallest_shard_bytes(nbytes, counts[path], options.ranks)
            for path, nbytes in matrix_bytes.items()
            if not self.sizes[path].is_encoded
        }
        # The number of each bank's layer.
        self.numbers = layer_numbers(self.bank_bytes)
        if len(set(self.numbers.values())) < len(self.numbers):  # several banks in one layer
            self.numbers = {path: index for index, path in enumerate(self.bank_bytes)}
        in_banks = {id(value) for values in experts.values() for value in values.values()}
        others = {id(value): value.nbytes for value in (*model.parameters(), *model.buffers())}
        self.dense_bytes = sum(nbytes for key, nbytes in others.items() if key not in in_banks)
        self.dtype = _dtype_of(experts)
        # Both are None, with the reason in `unknown`, if there is no profile or no formula for the model.
        self.hardware, self.unknown = _machine(planning, options, device, self.dtype)
        self.architecture: Architecture | None = None
        if self.hardware is not None or planning.budget_bytes is not None:
            self.architecture, why = _architecture(model, experts, self.numbers, self.dtype)
            self.unknown = self.unknown or why

    def weights(self) -> DeviceMemory:
        """Return the bytes on the device under every decision, without activations."""
        weights = resting_bytes(self.dense_bytes, self.shard_bytes.values(), self.options.staging_buffers)
        if self.planning.serving_memory is None:
            return weights
        served = self.planning.serving_memory(self.architecture, self.planning.sequences.tokens, self.dtype)
        parts = {name: getattr(served, name) for name in ("kv_bytes", "attention_bytes", "logits_bytes")}
        return dataclasses.replace(weights, **parts)

    def plan(self, stay: tuple[str, ...] | None, slots: int | None) -> MadePlan:
        """Choose the layers that stay resident and the number of slots, unless `stay` or `slots` sets them."""
        budget = self.planning.budget_bytes
        # With `stay` the planner does not consult the budget.
        chooses_slots = slots is None and stay is not None and budget is not None
        counts: tuple[int | None, ...] = (DEFAULT_SLOTS, 1) if chooses_slots else (slots,)
        for count in counts:
            problem = self._problem(stay, count)
            try:
                made = make_plan(problem)
            except BudgetError as error:
                raise self._too_small(problem, error.needed_bytes) from error
            if budget is None or stay is None or _peak_bytes(made) <= budget:
                return made
        raise self._too_small(problem, made.schedule.memory_bytes)

    def _problem(self, stay: tuple[str, ...] | None, slots: int | None) -> PlanningProblem:
        if self.hardware is None or self.architecture is None:
            return self._by_bytes(stay, slots)
        return self._by_sizes(self.hardware, self.architecture, stay, slots)

    def _too_small(self, problem: PlanningProblem, banks_bytes: int) -> InputError:
        """Return the error for a budget that is too small for `banks_bytes` of slots and shards."""
        assert problem.resting is not None
        resting = problem.resting
        served, remedy = "", "or fewer tokens"
        if self.planning.serving_memory is not None:
            served = (
                f", attention over their trie {resting.attention_bytes:.0f}, or logits after them "
                f"{resting.logits_bytes:.0f}, the cache of keys and values {resting.kv_bytes:.0f}"
            )
            remedy = "fewer step_tokens, or a smaller kv_cache"
        enough_bytes = math.ceil(resting.peak_bytes) + banks_bytes
        return InputError(
            f"memory_budget is {self.planning.memory_budget!r}, which is too small: dense weights and staging "
            f"buffers take {resting.resident_bytes + resting.slot_bytes:.0f} bytes, activations of {problem.batch} "
            f"sequences of {problem.sequence} tokens {resting.activation_bytes:.0f}{served}, and slots and shards "
            f"{banks_bytes}; use at least {enough_bytes} bytes, {remedy}",
            name="memory_budget",
            value=self.planning.memory_budget,
            expected=enough_bytes,
        )

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
            transport=self.options.transport,
        )
        return model_problem(
            setting,
            self.options.home,
            banks={self.numbers[path]: sizes for path, sizes in self.sizes.items() if sizes.is_encoded},
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
        has_shards = home_named(self.options.home).keeps_shards_on_device
        shards, in_place = (self.shard_bytes, self.read_in_place_bytes) if has_shards else ({}, {})
        phases = bank_phases(self.sizes.items(), self.numbers, shards, in_place)
        resident = None if stay is None else tuple(index for index, phase in enumerate(phases) if phase.name in stay)
        budget = self.planning.budget_bytes
        return PlanningProblem(
            phases=phases,
            home=self.options.home,
            resting=weights,
            batch=sequences.count,
            sequence=sequences.length,
            machine=ExecutionModel(fills_ahead=self.options.transport != COLLECTIVE),
            budget_bytes=None if budget is None else float(budget),
            resident=resident,
            slots=slots,
            unknown=self.unknown,
            memory_source=memory_source(self.architecture is not None),
        )


def _peak_bytes(made: MadePlan) -> float:
    assert made.memory is not None, "the problem of a placement has the weights"
    return made.memory.peak_bytes


def _check_device(made: MadePlan, planning: PlanningOptions, options: HomeOptions) -> None:
    """Raise InputError if the plan, or the budget, needs more memory than the device has for this process."""
    limit, budget = planning.device_bytes, planning.budget_bytes
    if limit is None:
        return
    if budget is not None and budget > limit:
        text = (
            f"memory_budget is {planning.memory_budget!r}, but the device has {limit} bytes for this process; use at "
            "most these, or fewer processes on the device"
        )
        raise InputError(text, name="memory_budget", value=planning.memory_budget, expected=limit)
    if _peak_bytes(made) > limit:
        assert made.memory is not None
        advice = "stream the experts, with another home" if options.home == "device" else "use fewer slots"
        text = (
            f"the model does not fit: it needs {made.memory}, and the device has {limit} bytes for this process; "
            f"{advice}, fewer step_tokens, or a smaller kv_cache"
        )
        raise InputError(text, name="home", value=options.home, expected=limit)


def _machine(
    planning: PlanningOptions, options: HomeOptions, device: torch.device, dtype: str
) -> tuple[Hardware | None, str]:
    """Return a pair: the profile with this model's ranks and emulated links, and an empty text; or None and the reason.

    Raises InputError if the profile in the options has no link from the home, or no rate for `dtype`.
    """
    command = calibrate_command(device, options.ranks)
    try:
        hardware = planning.machine(device, options.ranks)
    except InputError as error:
        if planning.hardware is not None:
            raise
        # The user did not choose this stored profile, so a damaged or outdated one is no error.
        unknown = f"the stored profile of this machine is not used: {error}; {command} stores another one"
        logger.warning("%s", unknown)
        return None, unknown
    if hardware is None:
        return None, f"{NO_PROFILE}; {command} makes one"
    hardware = with_ranks(hardware, options.ranks)
    for name, link in options.links().items():
        if link.bytes_per_s is not None:
            hardware = with_emulated_link(hardware, link.bytes_per_s, (name,))
    try:
        gather_seconds(hardware, 1.0, options.home, options.transport)
        peak_flops_per_s(hardware, dtype)
    except InputError as error:
        if planning.hardware is not None:
            raise
        return None, str(error)  # the stored profile is no error, see above
    return hardware, ""


def _dtype_of(experts: Experts) -> str:
    """Return the short name of the expert weights' dtype, or torch's name if formulas do not know it."""
    dtype = next(value.dtype for values in experts.values() for value in values.values())
    try:
        return short_dtype(dtype)
    except InputError:
        return str(dtype).removeprefix("torch.")


def _architecture(
    model: nn.Module, experts: Experts, numbers: Mapping[str, int], dtype: str
) -> tuple[Architecture | None, str]:
    """Return a pair: the model's sizes and an empty text, or None and the reason why the sizes are unknown.

    Sizes of attention are from the config, sizes of experts from their tensors: since the config was written, some
    layers may have got fewer or narrower experts.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None, f"the sizes of {type(model).__name__} are not known, because it has no transformers config"
    try:
        read = from_config(config, dtype=dtype)
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
    """Return `layer` with the width and number of the actual experts; None if no width and number fit their bytes."""
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

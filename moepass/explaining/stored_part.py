"""The part of a report on a quantised checkpoint: what its files hold, and a forecast that computes from that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from moepass.explaining.report import StoredPart
from moepass.models.sizes.weight_formats import WeightFormat
from moepass.passes.planner.forecast import Forecast
from moepass.passes.planner.strategies import ASYNCEP, Setting, banks_bytes

# What transformers calls the configuration that loads a format dequantised.
_LOADERS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


def stored_part(setting: Setting, best_of: Callable[[Setting], Forecast]) -> StoredPart | None:
    """None where the checkpoint of `setting`'s architecture is not quantised, or in a format of unknown sizes.

    `setting` is what moepass runs, and `best_of` the best forecast of a setting over the homes to try.
    """
    stored = setting.architecture.stored
    if stored is None:
        return None
    has_rate = stored.computes_in in setting.hardware.flops
    computes_in = stored.computes_in if has_rate else setting.architecture.dtype
    native = dataclasses.replace(setting, stored=stored, dtype=computes_in)
    experts = setting.architecture.typical_moe_layer.experts
    assert experts is not None
    made, sizes = best_of(native), native.bank(experts)
    asyncep = made.cost(ASYNCEP)
    others = [cost for cost in made.comparison if cost.strategy != ASYNCEP and cost.fits]
    fastest = min(others, key=lambda cost: cost.step_seconds) if others else None
    return StoredPart(
        format=stored.name,
        expert_bytes=banks_bytes(native),
        other_bytes=native.dense_bytes,
        bank_link_bytes=sizes.link_bytes,
        bank_slot_bytes=sizes.slot_bytes,
        computes_in=computes_in,
        runs_as=setting.dtype if setting.stored is None else stored.name,
        home=made.home,
        asyncep_step_seconds=asyncep.step_seconds if asyncep.fits else None,
        asyncep_memory_bytes=asyncep.memory_bytes,
        fastest_other=fastest.strategy if fastest else None,
        fastest_other_step_seconds=fastest.step_seconds if fastest else None,
    )


def stored_assumption(setting: Setting, unknown: str) -> str:
    """What the report's numbers are of where the checkpoint is quantised; empty where it is not. `unknown` says why the
    sizes of its format are not known."""
    if unknown:
        return f"{unknown}; all numbers are those of weights in {setting.dtype}, which moepass runs once dequantised"
    stored = setting.architecture.stored
    if stored is None or setting.stored is not None:
        return ""
    return (
        f"the checkpoint is in {stored.name}, which moepass does not run yet: it runs the weights dequantised to "
        f"{setting.dtype}, and all strategies are computed with these, but for the forecast in {stored.name}"
    )


def load_dequantised(stored: WeightFormat, checkpoint: str) -> str:
    """Python that loads a checkpoint of that format in the dtype that moepass runs. `checkpoint` is a literal."""
    return (
        f"model = transformers.AutoModelForCausalLM.from_pretrained({checkpoint}, "
        f"quantization_config=transformers.{_LOADERS[stored.name]}(dequantize=True))"
    )

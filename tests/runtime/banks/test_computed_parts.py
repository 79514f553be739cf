"""Recipes compute the same tensors from parameters as the graph does in every run, bit by bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from moepass.models.errors import InputError
from moepass.passes.blocks.computed_weights import (
    NotComputedAheadError,
    before_transposes,
    recipe_of,
    weight_parameters,
    weight_steps,
)
from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BankSpec, Plan
from moepass.passes.ir.shards import pack_layout, shard_layout
from moepass.passes.ir.weight_recipe import WeightRecipe
from moepass.runtime.banks.banks import write_parts
from moepass.runtime.banks.computed_parts import computed_part
from moepass.runtime.banks.mutation_guard import MutationGuard

OWN, INNER, OUTER = 3, 8, 6
Weights = Callable[..., torch.Tensor]


def _parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((OWN, OUTER, INNER), (OWN * OUTER, INNER), (OWN, 1, INNER), (OWN, OUTER, 2), (OWN, 2, INNER))
    return [torch.randn(shape, generator=generator) for shape in shapes]


# Functions of stacked weights [experts, out, in], a flat matrix [experts · out, in], scales [experts, 1, in], and a
# pair of LoRA.
WEIGHTS: dict[str, Weights] = {
    "cast": lambda stack, flat, scale, a, b: stack.bfloat16(),
    "through float16": lambda stack, flat, scale, a, b: stack.half().bfloat16().float(),
    "flat": lambda stack, flat, scale, a, b: flat.view(OWN, OUTER, INNER),
    "flat, experts in turn": lambda stack, flat, scale, a, b: flat.view(OUTER, OWN, INNER).transpose(0, 1),
    "chunks": lambda stack, flat, scale, a, b: torch.stack([chunk.t() for chunk in flat.chunk(OWN)]),
    "slices": lambda stack, flat, scale, a, b: torch.cat(
        [flat[OUTER * e : OUTER * (e + 1)].to(torch.float16).unsqueeze(0) for e in range(OWN)]
    ),
    "one by one": lambda stack, flat, scale, a, b: torch.stack([stack[e].bfloat16() for e in range(OWN)]),
    "scaled": lambda stack, flat, scale, a, b: stack.bfloat16() * scale.bfloat16(),
    "divided": lambda stack, flat, scale, a, b: -(stack - 1) / 3 + scale,
    "LoRA": lambda stack, flat, scale, a, b: stack + 0.5 * (a @ b),
    "permuted copy": lambda stack, flat, scale, a, b: stack.permute(0, 2, 1).contiguous(),
}


def _graph(weights: Weights) -> tuple[Node, list[torch.Tensor]]:
    """Return the node that computes `weights` from parameters in a graph, and these parameters."""
    parameters = _parameters()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(parameter) for parameter in parameters]
        module = make_fx(weights)(*fakes)
    for node in graph_inputs(module.graph):
        node.meta[ARGUMENT_KEY] = False
    (result,) = module.graph.output_node().all_input_nodes
    return result, parameters


def _recipe(result: Node, parameters: list[torch.Tensor]) -> tuple[WeightRecipe, list[torch.Tensor]]:
    """Return the recipe of `weights`, and the parameters that it reads."""
    inputs = graph_inputs(result.graph)
    read = weight_parameters(result)
    recipe = recipe_of(result, 0, {node: position for position, node in enumerate(read)})
    return recipe, [parameters[inputs.index(node)] for node in read]


def _bank(recipe: WeightRecipe, part: torch.Tensor) -> BankSpec:
    layout = pack_layout([("weight_0", tuple(part.shape), part.dtype)])
    return BankSpec(0, "experts", "adopted", BankFormat.plain(layout.nbytes), layout.tensors, recipes=(recipe,))


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_a_recipe_computes_the_same_as_the_graph(weights: Weights) -> None:
    result, parameters = _graph(weights)
    recipe, read = _recipe(result, parameters)
    expected = weights(*parameters)
    computed = computed_part(recipe, read)
    assert computed.dtype is expected.dtype
    assert torch.equal(computed, expected)
    # Plans are stored, so the recipe must survive encoding.
    bank = _bank(recipe, expected)
    stored = Plan.from_json(Plan(banks=(bank,)).to_json()).banks[0]
    assert stored == bank
    shard = torch.empty(shard_layout(stored, 0).nbytes, dtype=torch.uint8)
    write_parts(stored, 0, read, shard)
    assert torch.equal(stored.tensors[0].view(shard), expected)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(sorted(WEIGHTS)), min_size=2, max_size=2), st.booleans())
def test_recipes_of_several_tensors_may_read_the_same_parameters(names: list[str], is_summed: bool) -> None:
    first, second = (WEIGHTS[name] for name in names)

    def both(*given: torch.Tensor) -> torch.Tensor:
        left, right = (weights(*given).flatten().float() for weights in (first, second))
        return left + right if is_summed else torch.cat([left, right])

    result, parameters = _graph(both)
    recipe, read = _recipe(result, parameters)
    assert torch.equal(computed_part(recipe, read), both(*parameters))


def test_transposes_of_each_expert_alone_stay_in_the_graph() -> None:
    result, _ = _graph(lambda stack, *others: stack.bfloat16().transpose(1, 2).permute(0, 2, 1))
    assert str(before_transposes(result).target) == "aten._to_copy.default"
    result, _ = _graph(lambda stack, *others: stack.transpose(0, 1))
    assert before_transposes(result) is result


REFUSED: dict[str, tuple[Weights, str]] = {
    "another operation": (lambda stack, *others: stack.sin(), "expected casts, views, slices"),
    "random numbers": (lambda stack, *others: stack * torch.rand(OWN, 1, 1), "goes into it"),
    "bits": (lambda stack, *others: stack.view(torch.int32).view(torch.float32) + 1, ""),
    "strides": (lambda stack, *others: stack.as_strided([OWN, INNER, OUTER], [48, 1, 8]), "goes into it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_operators_that_compute_weights_are_named(case: str) -> None:
    weights, reason = REFUSED[case]
    result, parameters = _graph(weights)
    if not reason:  # an accepted recipe must compute the right tensor
        recipe, read = _recipe(result, parameters)
        assert torch.equal(computed_part(recipe, read), weights(*parameters))
        return
    with pytest.raises(NotComputedAheadError, match=reason):
        weight_steps(result)


def test_arguments_and_parameters_that_are_written_to_are_no_weights() -> None:
    result, _ = _graph(WEIGHTS["scaled"])
    scale = graph_inputs(result.graph)[2]
    scale.meta[ARGUMENT_KEY] = True
    with pytest.raises(NotComputedAheadError, match="which a caller may pass anew in every run"):
        weight_steps(result)
    scale.meta[ARGUMENT_KEY] = False
    with result.graph.inserting_after(result):
        result.graph.call_function(torch.ops.aten.copy_.default, (scale, scale))
    with pytest.raises(NotComputedAheadError, match="to which the model writes in every run"):
        weight_steps(result)


@pytest.mark.parametrize("name", ["aten.sin.default", "aten.add_.Tensor", "os.view.default", "aten.cat.out", "eval"])
def test_no_other_operator_runs(name: str) -> None:
    result, parameters = _graph(WEIGHTS["cast"])
    recipe, read = _recipe(result, parameters)
    (step,) = recipe.steps
    changed = dataclasses.replace(recipe, steps=(json.dumps({**json.loads(step), "operator": name}),))
    with pytest.raises(InputError, match="a recipe computes weights by"):
        computed_part(changed, read)


@pytest.mark.parametrize("debug", [False, True])
def test_writes_to_inputs_of_recipes_are_noticed(debug: bool) -> None:
    result, parameters = _graph(WEIGHTS["scaled"])
    recipe, read = _recipe(result, parameters)

    def compute(parts: Any) -> list[torch.Tensor]:
        return [computed_part(recipe, parts)]

    watch = MutationGuard(read, [], compute=compute, computed=compute(read))
    assert watch.are_unchanged(read, debug)
    read[1].add_(0)
    assert watch.are_unchanged(read, debug)
    read[1].data.mul_(2)
    assert watch.are_unchanged(read, debug) is not debug
    read[1].add_(0)
    for _ in range(2):
        assert not watch.are_unchanged(read, debug)

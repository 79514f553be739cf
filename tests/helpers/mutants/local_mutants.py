"""Change layers of one rank at one node, and check that passes rewrite them correctly or leave them unchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.nodes import fake_value
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import Pass, PassContext, run_passes
from moepass.runtime.lowering.lower_segments import decompositions
from tests.helpers.mutants.graph_mutants import (
    FLOAT_CHANGES,
    INT_CHANGES,
    changes_of,
    finite_or_none,
    mutant_of,
)
from tests.helpers.mutants.random_cases import check_cases

WAYS: tuple[int | str, ...] = (*range(4), *FLOAT_CHANGES, *INT_CHANGES, "flag", "constant")


class LocalMutants:
    """Checks `passes` on the layer that `build` returns, changed at one node, with each of `inputs`."""

    def __init__(self, build: Callable[[], nn.Module], inputs: Sequence[torch.Tensor], passes: Sequence[Pass]) -> None:
        self.build, self.inputs, self.passes = build, inputs, passes
        self._capture()

    def _capture(self) -> None:
        """Capture the graph of the layer, with a symbolic number of tokens, and its arguments for each input."""
        modules: list[GraphModule] = []
        self.called_with: list[tuple[Any, ...]] = []

        def keep(module: GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
            modules.append(module)

            def run(given: list[Any]) -> Any:
                self.called_with.append(tuple(given))
                return module.forward(*given)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        torch.manual_seed(0)
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep, inference_compiler=keep, decompositions=decompositions("eager"))
        switches = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
        with torch.no_grad(), torch._dynamo.config.patch(switches):
            compiled = torch.compile(self.build().eval(), backend=backend, dynamic=True, fullgraph=True)
            for tokens in self.inputs:
                compiled(tokens)
        (self.module,) = modules
        self._known = self._known_sizes()

    def _known_sizes(self) -> tuple[object, object]:
        """Return what is known of the sizes in the graph: their ranges, and the expressions that replace them."""
        values = map(fake_value, self.module.graph.nodes)
        environment = next(value for value in values if isinstance(value, torch.SymInt)).node.shape_env
        return dict(environment.var_to_range), dict(environment.replacements)

    @torch.no_grad()
    def check(self, node_index: int, how: int | str) -> str:
        """Return the outcome for node `node_index` changed in way `how`. Raises AssertionError if it is wrong."""
        if self._known_sizes() != self._known:
            self._capture()  # the rewrite of an earlier mutant specialised a size, such as the number of tokens
        mutant = mutant_of(self.module, node_index, how)
        if mutant is None:
            return "no mutant"
        written = run_passes(self.passes, mutant, Plan(), PassContext()).module
        for arguments in self.called_with:
            expected = finite_or_none(functools.partial(mutant.forward, *arguments))
            if expected is None:
                return "meaningless"
            torch.testing.assert_close(written.forward(*arguments), expected, rtol=1e-4, atol=1e-4)
        return "right" if any(map(is_grouped_gemm, written.graph.nodes)) else "left"

    def check_some(self, most: int, needed: Collection[str]) -> None:
        """Check `most` changes of single nodes, drawn at random, and more until all outcomes `needed` have occurred."""
        check_cases(changes_of(self.module, WAYS), self.check, most, needed)

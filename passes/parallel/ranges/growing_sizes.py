"""Check that no constant, which may be a threshold, slices or reshapes a dimension that grows with the tokens.

Contract
    in    a node of a parallel block's region, which may compute data, indices or sizes
    out   NotThisForm, naming the node and the constant, if the node slices, pads, selects, splits, joins, repeats or
          reshapes a growing dimension by a constant that is not a structural number of the block; or if it computes
          a size that is not a sum of known sizes, each multiplied by a structural number

In every run with fewer than 5000 rows, `rows[:5000]` and `x.repeat(5000).view(-1, 5000)[0]` have all of them.
Structural numbers are factors by which every run repeats its tokens: ranks, experts per token, and their product.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch.fx import Node

from moepass.passes.graph.nodes import fake_value
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.arguments import named_arguments
from moepass.passes.ops.traits import Trait, has_trait, operation
from moepass.passes.parallel.match.parallel_block import ParallelBlock

# From this number on, the bound of a slice means the end of any tensor.
END = 2**31
_CHANGE = "let nothing between the collectives of the experts depend on it"


def refuse(node: Node, does: str, advice: str = _CHANGE) -> NoReturn:
    """Raise NotThisForm because of what `node` `does`."""
    raise NotThisForm(f"{named(node)} {does}; {advice}")


def structural_numbers(block: ParallelBlock) -> frozenset[int]:
    """Return the numbers of ranks and of experts per token, and their product; for slots also numbers of experts."""
    counts = {1, block.top_k}
    if block.form == "all_to_all_slots":
        counts |= {block.experts, *block.expert_counts}
    return frozenset(ranks * number for ranks in (1, block.group.ranks) for number in counts)


def token_numbers(block: ParallelBlock) -> frozenset[int]:
    """Return this rank's numbers of tokens and pairs if they are fixed in the graph. Mock runs have these numbers."""
    sizes = [fake_value(source).shape[0] for role, source in block.sources.items() if role != "counts"]
    return frozenset(size for size in sizes if isinstance(size, int))


def check_sizes(node: Node, structural: Collection[int], tokens: Collection[int]) -> None:
    """Raise NotThisForm if `node` uses a constant on a growing dimension."""
    if isinstance(fake_value(node), torch.SymInt):
        _check_expression(node, structural, tokens)
    name, arguments = operation(node), named_arguments(node)
    value = fake_value(node.all_input_nodes[0]) if node.all_input_nodes else None
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    if has_trait(node, Trait.RESHAPE):
        _check_view(node, list(shape), list(fake_value(node).shape), structural)
    elif name == "slice.Tensor":
        ends = [arguments.get("start"), arguments.get("end")]
        constants = [end for end in ends if isinstance(end, int) and abs(end) < END and end not in tokens]
        _check(node, "slices at", shape, arguments, [*constants, arguments.get("step", 1)])
    elif name in ("select.int", "select_scatter"):
        _check(node, "selects", shape, arguments, [arguments["index"]])
    elif name == "slice_scatter":
        ends = [arguments.get("start"), arguments.get("end"), arguments.get("step", 1)]
        _check(node, "writes at", shape, arguments, [end for end in ends if isinstance(end, int) and abs(end) < END])
    elif has_trait(node, Trait.SPLIT):
        sizes = next((arguments[name] for name in ("split_size", "split_sizes", "chunks") if name in arguments), ())
        _check(node, "splits at", shape, arguments, sizes if isinstance(sizes, (list, tuple)) else [sizes])
    elif name == "constant_pad_nd":
        for index, amount in enumerate(arguments["pad"]):
            _check(node, "pads by", shape, {"dim": -1 - index // 2}, [amount])
    elif name == "repeat":
        repeats = arguments["repeats"]
        for index, number in enumerate(reversed(repeats[-len(shape) :] if shape else [])):
            if number not in structural:
                _check(node, "repeats by", shape, {"dim": -1 - index}, [number])
    elif name == "cat":
        shape, dim = fake_value(node).shape, arguments.get("dim", 0)
        values = [fake_value(tensor) for tensor in arguments["tensors"]]
        sizes = [size_along(node, value.shape, dim) for value in values if value.dim() == len(shape)]
        _check(node, "joins by", shape, arguments, sizes)


def _check_expression(node: Node, structural: Collection[int], tokens: Collection[int]) -> None:
    """Check that a size is a sum of sizes, plus or minus 1."""
    size = fake_value(node)
    for term, times in size.node.expr.as_coefficients_dict().items():
        if term.is_Symbol and abs(times) in structural:
            continue
        if term.is_number and (abs(times) <= 1 or any(abs(times) == n * m for n in structural for m in tokens)):
            continue
        if term.is_number:
            term_text = f"with {times * term} added"
        else:
            term_text = f"in which {'one' if term.is_Symbol else 'a product of some'} counts {times} times"
        refuse(node, f"is a sum of sizes {term_text}, which may matter for more tokens")


def _check(node: Node, does: str, shape: Any, arguments: dict[str, Any], constants: Any) -> None:
    if isinstance(size_along(node, shape, arguments.get("dim", 0)), int):
        return
    for constant in constants:
        if isinstance(constant, int) and abs(constant) > 1:
            _refuse_constant(node, does, constant)


def size_along(node: Node, shape: Any, dim: Any) -> Any:
    """Return the size of dimension `dim`, an argument of `node`. Raises NotThisForm if there is no such dimension."""
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise NotThisForm(f"{named(node)} cuts dimension {dim} of {len(shape)}")
    return shape[dim]


def _refuse_constant(node: Node, does: str, constant: int) -> NoReturn:
    refuse(node, f"{does} the constant {constant} in a dimension without a fixed size")


def _check_view(node: Node, before: list[Any], after: list[Any], structural: Collection[int]) -> None:
    """Check that a view combines growing dimensions with structural numbers only. Dimensions it keeps may be any."""
    before, after = ([size for size in sizes if str(size) != "1"] for sizes in (before, after))
    while before and after and str(before[0]) == str(after[0]):
        before, after = before[1:], after[1:]
    while before and after and str(before[-1]) == str(after[-1]):
        before, after = before[:-1], after[:-1]
    reshaped = [*before, *after]
    if all(isinstance(size, int) for size in reshaped):
        return
    for size in reshaped:
        if isinstance(size, int) and size not in structural:
            _refuse_constant(node, "reshapes by", size)


def dimensions_that_grow(node: Node) -> int:
    """Return how many dimensions of `node` have no constant size."""
    value = fake_value(node)
    return sum(not isinstance(size, int) for size in value.shape) if isinstance(value, torch.Tensor) else 0


def grows_in_size(node: Node) -> bool:
    """Return whether the number of elements is not constant."""
    return dimensions_that_grow(node) > 0

"""Runs each operator of the table of traits on small tensors, and checks what its traits claim."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten, tree_map

from moepass.passes.ops.arguments import fill_number, is_arange, moved_elements, permutation
from moepass.passes.ops.traits import _TABLE as TABLE
from moepass.passes.ops.traits import MOVES, Trait, base_operation, has_trait, operation, traits_of

aten, prims = torch.ops.aten, torch.ops.prims

ROWS = torch.tensor([[[3.0, -1.5, 0.25, 7.0], [2.0, 9.0, -4.0, 0.5], [1.0, 6.0, 8.0, -2.0]]] * 2)
ROWS[1] = ROWS[1].flip(0) + 0.125
POSITIVE, WHOLE, TRUTHS = ROWS.abs() + 1, ROWS.to(torch.int64), ROWS > 1
PLACES = torch.tensor([2, 0])
# Along dimension 1 of ROWS, an index with all dimensions.
INDEX = torch.tensor([2, 0, 1]).view(1, 3, 1).expand(2, 3, 4).contiguous()
MATRIX, OTHER = ROWS[0], ROWS[1].t().contiguous()
WEIGHT = torch.tensor([1.0, 2.0, 0.5, -1.0])

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _calls() -> Iterator[Call]:
    """Yield calls of operators: those that act along a dimension act along dimension 1 of ROWS."""
    for target in (aten.clone, aten.alias, aten.detach, aten.contiguous, aten.lift_fresh_copy):
        yield target.default, (ROWS,), {}
    yield aten._conj.default, (ROWS.to(torch.complex64),), {}
    yield aten._to_copy.default, (ROWS,), {"dtype": torch.float64}
    yield prims.convert_element_type.default, (ROWS, torch.float64), {}
    for target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        yield target, (ROWS, [6, 4]), {}
    yield aten.view.dtype, (ROWS, torch.int32), {}
    yield aten.squeeze.default, (ROWS[:1],), {}
    yield aten.squeeze.dim, (ROWS[:1], 0), {}
    yield aten.squeeze.dims, (ROWS[:1], [0]), {}
    yield aten.unsqueeze.default, (ROWS, 1), {}
    yield aten.permute.default, (ROWS, [2, 0, 1]), {}
    yield aten.transpose.int, (ROWS, 0, -1), {}
    yield aten.t.default, (MATRIX,), {}
    yield aten.expand.default, (ROWS[:1], [5, 3, 4]), {}
    yield aten.repeat.default, (ROWS, [2, 1, 3]), {}
    yield aten.slice.Tensor, (ROWS, 1, 1, 3), {}
    yield aten.select.int, (ROWS, 1, 2), {}
    for target in (aten.split.Tensor, aten.unsafe_split.Tensor, aten.chunk.default):
        yield target, (ROWS, 2, 1), {}
    for target in (aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default):
        yield target, (ROWS, [1, 2], 1), {}
    yield aten.unbind.int, (ROWS, 1), {}
    yield aten.flip.default, (ROWS, [1]), {}
    yield aten.roll.default, (ROWS, [1], [1]), {}
    yield aten.index.Tensor, (ROWS, [None, PLACES]), {}
    yield aten._unsafe_index.Tensor, (ROWS, [None, PLACES]), {}
    yield aten.index_select.default, (ROWS, 1, PLACES), {}
    yield aten.gather.default, (ROWS, 1, INDEX), {}
    for target in (aten.index_put.default, aten._unsafe_index_put.default):
        yield target, (ROWS, [None, PLACES], ROWS[:, :2] + 20), {}
    yield aten.index_copy.default, (ROWS, 1, PLACES, ROWS[:, :2] + 20), {}
    yield aten.index_add.default, (ROWS, 1, PLACES, ROWS[:, :2] + 20), {}
    yield aten.scatter.src, (ROWS, 1, INDEX, ROWS + 20), {}
    yield aten.scatter.value, (ROWS, 1, INDEX[:, :1], 50.0), {}
    yield aten.scatter.reduce, (ROWS, 1, INDEX, ROWS + 20), {"reduce": "multiply"}
    yield aten.scatter.value_reduce, (ROWS, 1, INDEX[:, :1], 50.0), {"reduce": "multiply"}
    yield aten.scatter_add.default, (ROWS, 1, INDEX, ROWS + 20), {}
    yield aten.slice_scatter.default, (ROWS, ROWS[:, :2] + 20, 1, 1, 3), {}
    yield aten.select_scatter.default, (ROWS, ROWS[:, 0] + 20, 1, 1), {}
    yield aten.cat.default, ([ROWS, ROWS + 20], 1), {}
    yield aten.stack.default, ([ROWS, ROWS + 20], 1), {}
    yield aten.where.self, (TRUTHS, ROWS, ROWS + 20), {}
    yield aten.where.ScalarSelf, (TRUTHS, 5.0, ROWS), {}
    yield aten.where.ScalarOther, (TRUTHS, ROWS, 5.0), {}
    yield aten.where.Scalar, (TRUTHS, 5.0, 6.0), {}
    yield aten.where.default, (TRUTHS,), {}
    yield aten.masked_fill.Scalar, (ROWS, TRUTHS, 5.0), {}
    yield aten.masked_fill.Tensor, (ROWS, TRUTHS, torch.tensor(5.0)), {}
    yield aten.constant_pad_nd.default, (ROWS, [1, 2], 5.0), {}
    yield aten.constant_pad_nd.default, (ROWS, [1, 2]), {}
    for target in (aten.zeros.default, aten.ones.default, aten.empty.memory_format):
        yield target, ([2, 3],), {}
    yield aten.full.default, ([2, 3], 5.0), {}
    yield aten.scalar_tensor.default, (5.0,), {}
    for target in (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default):
        yield target, (ROWS, [2, 3]), {}
    yield aten.new_full.default, (ROWS, [2, 3], 5.0), {}
    yield aten.full_like.default, (ROWS, 5.0), {}
    yield aten.fill.Scalar, (ROWS, 5.0), {}
    for target in (aten.zeros_like, aten.ones_like, aten.empty_like, aten.zero):
        yield target.default, (ROWS,), {}
    yield aten.empty_permuted.default, ([2, 3], [1, 0]), {}
    yield aten.empty_strided.default, ([2, 3], [3, 1]), {}
    yield aten.new_empty_strided.default, (ROWS, [2, 3], [3, 1]), {}
    yield aten.arange.default, (5,), {}
    yield aten.arange.start, (0, 5), {}
    yield (
        prims.iota.default,
        (5,),
        {**{"start": 0, "step": 1, "dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}},
    )
    yield aten.copy.default, (ROWS, ROWS + 20), {}
    for target in (aten.hardswish, aten.log_sigmoid, aten.log_sigmoid_forward, aten.isinf, aten.silu, aten.neg):
        yield target.default, (ROWS,), {}
    for target in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge):
        yield target.Tensor, (ROWS, ROWS.flip(1)), {}
        yield target.Scalar, (ROWS, 1), {}
    for target in (aten.logical_and, aten.logical_or, aten.logical_xor):
        yield target.default, (TRUTHS, TRUTHS.flip(1)), {}
    for target in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor):
        yield target.Tensor, (WHOLE, WHOLE.flip(1)), {}
    for target in (aten.logical_not, aten.bitwise_not):
        yield target.default, (TRUTHS,), {}
    for target in (aten.add, aten.sub, aten.mul):
        yield target.Tensor, (ROWS, ROWS[:, :1] + 20), {}
    yield aten.clamp.default, (ROWS, 0.5, 5.0), {}
    yield aten.clamp_min.default, (ROWS, 0.5), {}
    yield aten.clamp_max.default, (ROWS, 0.5), {}
    for target in (aten.minimum.default, aten.maximum.default, aten.max.other, aten.min.other):
        yield target, (ROWS, ROWS.flip(1)), {}
    yield aten.floor_divide.default, (ROWS, POSITIVE), {}
    yield aten.remainder.Tensor, (ROWS, POSITIVE), {}
    yield aten.remainder.Scalar, (ROWS, 2), {}
    for target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default):
        yield target, (ROWS, [1]), {}
    for target in (aten.any.dim, aten.all.dim, aten.prod.dim_int, aten.argmax.default, aten.argmin.default):
        yield target, (ROWS, 1), {}
    for target in (aten.max, aten.min, aten.median, aten.nanmedian):
        yield target.dim, (ROWS, 1), {}
    yield aten.mode.default, (ROWS, 1), {}
    yield aten.kthvalue.default, (ROWS, 2, 1), {}
    yield aten.topk.default, (ROWS, 2, 1), {}
    for target in (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction):
        yield target, (ROWS, [1]), {}
    yield aten.linalg_vector_norm.default, (ROWS, 2, [1]), {}
    yield aten.norm.ScalarOpt_dim, (ROWS, 2, [1]), {}
    for target in (aten.cumsum, aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp):
        yield target.default, (ROWS, 1), {}
    for target in (aten._softmax.default, aten._log_softmax.default):
        yield target, (ROWS, 1, False), {}
    for target in (aten.softmax.int, aten.log_softmax.int, aten._safe_softmax.default, aten.argsort.default):
        yield target, (ROWS, 1), {}
    yield aten.sort.default, (ROWS, 1), {}
    yield aten.sort.stable, (ROWS,), {"stable": True, "dim": 1}
    yield aten.glu.default, (torch.cat([ROWS, ROWS], 1), 1), {}
    yield aten.bincount.default, (PLACES,), {"minlength": 4}
    yield aten.histc.default, (WHOLE.float(), 40, -20, 19), {}
    yield aten.native_layer_norm.default, (ROWS, [4], WEIGHT, None, 1e-5), {}
    yield aten.layer_norm.default, (ROWS, [4], WEIGHT), {}
    yield aten.rms_norm.default, (ROWS, [4], WEIGHT), {}
    yield aten._fused_rms_norm.default, (ROWS, [4], WEIGHT, 1e-5), {}
    yield aten.native_group_norm.default, (ROWS, None, None, 2, 3, 4, 3, 1e-5), {}
    yield aten.mm.default, (MATRIX, OTHER), {}
    yield aten.addmm.default, (ROWS[0, :, :3], MATRIX, OTHER), {}
    yield aten._addmm_activation.default, (ROWS[0, 0, :3], MATRIX, OTHER), {}
    yield aten.linear.default, (MATRIX, ROWS[1]), {}
    yield aten.mv.default, (MATRIX, WEIGHT), {}
    yield aten.bmm.default, (ROWS, ROWS.transpose(1, 2)), {}
    yield aten.baddbmm.default, (ROWS[:, :, :3], ROWS, ROWS.transpose(1, 2)), {}


CALLS = [pytest.param(*call, id=str(call[0])) for call in _calls()]
# Operators that need other devices, other layouts or other ranks to run, and Python functions.
NOT_RUN = {
    *("wait_tensor", "_wrap_tensor_autograd", "getitem", "floordiv", "mod", "sym_max", "sym_min"),
    *("sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "_scaled_mm", "_int_mm", "convolution"),
    *("_grouped_mm", "transformers::grouped_mm_fallback", "empty_quantized", "_empty_affine_quantized"),
    *("_empty_per_channel_affine_quantized", "resize", "resize_as", "_resize_output"),
}


def _node(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Node, Any]:
    """Return a call as a node, and its result."""
    graph = Graph()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"input_{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, tree_map(placeholder, args), kwargs)
    node.meta["val"] = result = target(*args, **kwargs)
    return node, result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in tree_flatten(value)[0] if isinstance(item, torch.Tensor)]


def _changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return where two results differ, bit by bit, so that nan equals nan."""
    return ~((before == after) | (before.isnan() & after.isnan()) if before.is_floating_point() else before == after)


def _perturbed(call: Call) -> Iterator[tuple[torch.Tensor, tuple[int, ...], Any]]:
    """Yield each floating or boolean operand, an index of it, and the result after that element has changed."""
    target, args, kwargs = call
    for operand in _tensors(args):
        if operand.dtype is torch.int64:
            continue
        for index in itertools.product(*map(range, operand.shape)):
            other = operand.clone()
            other[index] = ~operand[index] if operand.dtype is torch.bool else operand[index] * 3 + 11

            def replaced(value: Any, of: torch.Tensor = operand, by: torch.Tensor = other) -> Any:
                return by if value is of else value

            yield operand, index, target(*tree_map(replaced, args), **kwargs)


def test_every_operator_of_the_table_is_run() -> None:
    run = {operation(_node(*call)[0]) for call in _calls()}
    run |= {name.split(".")[0] for name in run} | {f"{name}.default" for name in run}
    unchecked = {Trait.ATTENTION, Trait.TRAFFIC}
    names = {name for names, traits in TABLE for name in names.split() if unchecked.isdisjoint(traits)}
    assert names - run == NOT_RUN


@pytest.mark.parametrize(("target", "args", "kwargs"), CALLS)
def test_traits(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    node, result = _node(target, args, kwargs)
    assert traits_of(target) or base_operation(node) in ("view", "where")
    for trait, check in CHECKS.items():
        if has_trait(node, trait):
            check(node, result, (target, args, kwargs))
    if has_trait(node, *MOVES):
        _check_move(node, result)


def _check_move(node: Node, result: Any) -> None:
    """Each element of the result is one of an operand, or a number."""
    elements = moved_elements(node)
    assert elements is not None
    values = [element.meta["val"] if isinstance(element, Node) else element for element in elements]
    known = torch.cat([torch.as_tensor(value, dtype=ROWS.dtype).flatten() for value in values])
    for tensor in _tensors(result):
        assert torch.isin(tensor, known).all()


def _check_copy(node: Node, result: torch.Tensor, call: Call) -> None:
    torch.testing.assert_close(result, call[1][0], rtol=0, atol=0)


def _check_cast(node: Node, result: torch.Tensor, call: Call) -> None:
    assert result.dtype is torch.float64
    assert torch.equal(result, call[1][0].double())


def _check_reshape(node: Node, result: torch.Tensor, call: Call) -> None:
    assert torch.equal(result.reshape(-1), call[1][0].reshape(-1))
    assert result.dtype is call[1][0].dtype


def _check_permutation(node: Node, result: torch.Tensor, call: Call) -> None:
    assert torch.equal(result, call[1][0].permute(permutation(node)))


def _check_fill(node: Node, result: torch.Tensor, call: Call) -> None:
    assert (result == fill_number(node)).all()


def _check_arange(node: Node, result: torch.Tensor, call: Call) -> None:
    assert is_arange(node)
    assert result.tolist() == list(range(5))


def _check_sizes_only(node: Node, result: torch.Tensor, call: Call) -> None:
    for operand, _, after in _perturbed(call):
        is_source = operand is call[1][0]
        assert after.shape == result.shape
        assert not is_source or has_trait(node, Trait.UNINITIALISED) or torch.equal(after, result)


def _check_elementwise(node: Node, result: Any, call: Call) -> None:
    """A change of one element changes only elements at the positions to which it broadcasts."""
    first = _tensors(result)[0]
    for operand, index, after in _perturbed(call):
        marked = torch.zeros(operand.shape, dtype=torch.bool)
        marked[index] = True
        changed = _changed(first, _tensors(after)[0])
        assert not (changed & ~marked.broadcast_to(first.shape)).any()


def _check_along(node: Node, result: Any, call: Call) -> None:
    """A change of one element changes only elements with the same position in all dimensions but the second."""
    for operand, (first, _, last), after in _perturbed(call):
        assert operand.dim() == ROWS.dim()
        for before, changed in zip(_tensors(result), _tensors(after), strict=True):
            marked = torch.ones(before.shape, dtype=torch.bool)
            marked[first, ..., last] = False
            assert not (_changed(before, changed) & marked).any()


def _check_reduce(node: Node, result: Any, call: Call) -> None:
    assert all(tensor.shape == (2, 4) for tensor in _tensors(result))


def _check_scan(node: Node, result: Any, call: Call) -> None:
    assert all(tensor.shape == ROWS.shape for tensor in _tensors(result))


def _check_compare(node: Node, result: torch.Tensor, call: Call) -> None:
    assert result.dtype is torch.bool


def _check_logical(node: Node, result: torch.Tensor, call: Call) -> None:
    assert result.dtype in (torch.bool, torch.int64)


def _check_and(node: Node, result: torch.Tensor, call: Call) -> None:
    target, (left, right), _ = call
    assert not target(torch.zeros_like(left), right).any()
    assert not target(left, torch.zeros_like(right)).any()


def _check_bound(node: Node, result: torch.Tensor, call: Call) -> None:
    numbers = torch.cat([torch.as_tensor(value).flatten() for value in call[1]])
    assert torch.isin(result, numbers).all()


def _check_sum(node: Node, result: torch.Tensor, call: Call) -> None:
    """The results add up to all that is added, except that each partial sum of a scan holds the ones before."""
    last = result[:, -1] if has_trait(node, Trait.SCAN) else result
    expected = sum(tensor.numel() if has_trait(node, Trait.COUNT) else tensor.sum() for tensor in _added(node, call))
    assert last.sum() == expected


def _added(node: Node, call: Call) -> list[torch.Tensor]:
    return [tensor for tensor in _tensors(call[1]) if tensor.is_floating_point() or has_trait(node, Trait.COUNT)]


def _check_indices(node: Node, result: torch.Tensor, call: Call) -> None:
    assert result.dtype is torch.int64
    assert ((result >= 0) & (result < 3)).all()


def _check_indices_second(node: Node, result: Any, call: Call) -> None:
    values, indices = (tensor if tensor.dim() == ROWS.dim() else tensor.unsqueeze(1) for tensor in result)
    assert torch.equal(values, ROWS.gather(1, indices))


def _check_sort(node: Node, result: Any, call: Call) -> None:
    order = result if isinstance(result, torch.Tensor) else result[1]
    assert torch.equal(ROWS.gather(1, order), ROWS.sort(1).values)


def _check_norm(node: Node, result: Any, call: Call) -> None:
    """A change of one row changes that row of the result alone."""
    before = _tensors(result)[0]
    for operand, index, after in _perturbed(call):
        if operand is ROWS:
            changed = _changed(before, _tensors(after)[0])
            changed[index[: 1 if has_trait(node, Trait.GROUP_NORM) else 2]] = False
            assert not changed.any()


def _check_matmul(node: Node, result: torch.Tensor, call: Call) -> None:
    """The result is linear in the last operand, up to what is added and a function of each element."""
    target, (*front, last), kwargs = call
    zero = target(*front, torch.zeros_like(last), **kwargs)
    assert not zero.any() or base_operation(node) in ("addmm", "_addmm_activation", "baddbmm")
    if base_operation(node) != "_addmm_activation":
        torch.testing.assert_close(target(*front, last * 2, **kwargs) - zero, (result - zero) * 2)


CHECKS: dict[Trait, Callable[[Node, Any, Call], None]] = {
    **{Trait.COPY: _check_copy, Trait.CAST: _check_cast, Trait.RESHAPE: _check_reshape},
    **{Trait.PERMUTE: _check_permutation, Trait.FILL: _check_fill, Trait.FILL_LIKE: _check_fill},
    **{Trait.ARANGE: _check_arange, Trait.SIZES_ONLY: _check_sizes_only, Trait.REFILL: _check_sizes_only},
    **{Trait.ELEMENTWISE: _check_elementwise},
    **{Trait.ALONG: _check_along, Trait.TOGETHER: _check_along, Trait.REDUCE: _check_reduce, Trait.SCAN: _check_scan},
    **{Trait.COMPARE: _check_compare, Trait.LOGICAL: _check_logical, Trait.AND: _check_and, Trait.BOUND: _check_bound},
    **{Trait.SUM: _check_sum, Trait.INDICES: _check_indices, Trait.INDICES_SECOND: _check_indices_second},
    **{Trait.SORT: _check_sort, Trait.NORM: _check_norm, Trait.GROUP_NORM: _check_norm, Trait.MATMUL: _check_matmul},
}


def test_an_operator_of_another_library_is_another_operator() -> None:
    with torch.library._scoped_library("moepass_test_traits", "FRAGMENT") as library:
        library.define("clone(Tensor x) -> Tensor")
        target = torch.ops.moepass_test_traits.clone.default
        node = Graph().call_function(target, ())
        assert traits_of(target) == frozenset()
        assert base_operation(node) == "moepass_test_traits::clone"


def test_an_input_has_no_traits() -> None:
    node = Graph().placeholder("view")
    assert not has_trait(node, *Trait)
    assert base_operation(node) != "view"


def test_an_accumulating_write_is_no_move() -> None:
    node, _ = _node(aten.index_put.default, (ROWS, [None, PLACES], ROWS[:, :2], True), {})
    assert moved_elements(node) is None

"""Traits of the operators that passes know, in one table.

An operator has a trait if every call of it has the property, with any arguments. `tests/passes/ops/test_traits.py` runs
most operators of the table on random tensors, and checks that they have the properties.
"""

from __future__ import annotations

import enum
import functools
import operator

import torch
from torch.fx import Node

aten = torch.ops.aten


class Trait(enum.Enum):
    """A property of an operator.

    `source` is the first tensor among the arguments, `result` a tensor that the operator returns.
    """

    # ---- The result has the elements of the source.
    CAST = enum.auto()  # in another dtype
    COPY = enum.auto()  # unchanged
    RESHAPE = enum.auto()  # in the same order, in another shape
    PERMUTE = enum.auto()  # with permuted dimensions
    EXPAND = enum.auto()  # repeated along dimensions of size 1
    REPEAT = enum.auto()  # repeated as blocks
    FLIP = enum.auto()  # in reverse order along some dimensions
    ROLL = enum.auto()  # shifted along some dimensions
    SLICE = enum.auto()  # at an index or in a range of one dimension
    SPLIT = enum.auto()  # as one of several parts
    LOOKUP = enum.auto()  # at positions in an index tensor
    WAIT = enum.auto()  # after a collective has finished
    # ---- The result has elements of several operands.
    WRITE = enum.auto()  # the source, with other elements at indices
    SLICE_WRITE = enum.auto()  # the source, with other elements in a range of one dimension
    WRITE_SUM = enum.auto()  # the source, with values added at indices
    JOIN = enum.auto()  # one operand after the other
    CHOOSE = enum.auto()  # of the operand that a mask selects
    PAD = enum.auto()  # the source, with a number around it
    ITEM = enum.auto()  # one value of an operator that has several results
    # ---- The result is new.
    FILL = enum.auto()  # one number, in a given shape
    FILL_LIKE = enum.auto()  # one number, in the shape of the source
    REFILL = enum.auto()  # zero or a number from another argument, in the shape of the source
    EMPTY = enum.auto()  # uninitialised memory
    UNINITIALISED = enum.auto()  # partly uninitialised memory
    ARANGE = enum.auto()  # 0, 1, 2, ..
    # ---- The operator reads no elements of its source.
    SIZES_ONLY = enum.auto()  # only its size and type
    SIZE = enum.auto()  # the result is a size
    # ---- Each element of the result depends only on elements at the same position.
    ELEMENTWISE = enum.auto()  # of tensors that are broadcast
    COMPARE = enum.auto()
    LOGICAL = enum.auto()  # bit by bit; the result is bool or integer
    AND = enum.auto()  # 0 or False if an operand is, and the others are finite
    BOUND = enum.auto()
    FLOOR_DIVIDE = enum.auto()
    REMAINDER = enum.auto()
    # ---- The operator acts along dimensions.
    ALONG = enum.auto()  # `dim` or `dims` alone; all dimensions without these arguments
    TOGETHER = enum.auto()  # `dim` alone, of several operands that have equal sizes in all other dimensions
    REDUCE = enum.auto()  # the result does not have `dim`, or has it with size 1
    SCAN = enum.auto()  # the result has `dim` with its size
    SOFTMAX = enum.auto()
    SUM = enum.auto()
    COUNT = enum.auto()
    SORT = enum.auto()
    INDICES = enum.auto()  # the result is indices along `dim`
    INDICES_SECOND = enum.auto()  # the second result is indices along `dim`
    NORM = enum.auto()  # the last dimensions, as many as `normalized_shape` has
    GROUP_NORM = enum.auto()  # groups of features
    # ---- Products.
    MATMUL = enum.auto()
    BATCHED_MATMUL = enum.auto()
    GROUPED_MATMUL = enum.auto()
    CONVOLUTION = enum.auto()
    ATTENTION = enum.auto()
    # ---- None of the above: the operator costs only the memory traffic of its operands and results.
    TRAFFIC = enum.auto()


T = Trait

# Namespaces whose operators appear in the table without their namespace. An operator that a model registers under a
# name of ATen is another operator.
_NAMESPACES = {"aten", "prims", "_c10d_functional"}
_MODULES = {"_operator", "math", "torch", "builtins"}

_TABLE: tuple[tuple[str, tuple[Trait, ...]], ...] = (
    ("_to_copy convert_element_type", (T.CAST, T.ELEMENTWISE)),
    ("clone alias detach contiguous lift_fresh_copy", (T.COPY, T.ELEMENTWISE)),
    ("view _unsafe_view reshape squeeze unsqueeze", (T.RESHAPE,)),
    ("view.dtype", ()),  # reads the same bytes as other numbers
    ("permute transpose t", (T.PERMUTE,)),
    ("expand", (T.EXPAND,)),
    ("repeat", (T.REPEAT,)),
    ("slice select", (T.SLICE, T.ALONG)),
    ("split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unbind", (T.SPLIT, T.ALONG)),
    ("flip", (T.FLIP, T.ALONG)),
    ("roll", (T.ROLL, T.ALONG)),
    ("index _unsafe_index index_select", (T.LOOKUP,)),
    ("gather", (T.LOOKUP, T.TOGETHER)),
    ("index_put _unsafe_index_put index_copy", (T.WRITE,)),
    ("scatter.src scatter.value", (T.WRITE, T.TOGETHER)),
    ("scatter.reduce scatter.value_reduce", (T.TOGETHER,)),
    ("slice_scatter select_scatter", (T.SLICE_WRITE,)),
    ("index_add", (T.WRITE_SUM, T.SUM)),
    ("scatter_add", (T.WRITE_SUM, T.SUM, T.TOGETHER)),
    ("cat stack", (T.JOIN, T.TOGETHER)),
    ("where masked_fill", (T.CHOOSE, T.ELEMENTWISE)),
    ("where.default", ()),  # nonzero
    ("constant_pad_nd", (T.PAD,)),
    ("getitem", (T.ITEM,)),
    ("wait_tensor _wrap_tensor_autograd", (T.WAIT,)),
    ("zeros ones full scalar_tensor", (T.FILL,)),
    ("new_zeros new_ones new_full", (T.FILL, T.SIZES_ONLY)),
    ("zeros_like ones_like full_like", (T.FILL_LIKE, T.SIZES_ONLY)),
    ("fill zero", (T.REFILL,)),
    ("empty empty_permuted empty_strided", (T.EMPTY, T.UNINITIALISED)),
    ("empty_like new_empty new_empty_strided", (T.EMPTY, T.UNINITIALISED, T.SIZES_ONLY)),
    (
        "empty_quantized _empty_affine_quantized _empty_per_channel_affine_quantized resize resize_as _resize_output",
        (T.UNINITIALISED,),
    ),
    ("arange iota", (T.ARANGE,)),
    ("copy hardswish log_sigmoid log_sigmoid_forward isinf _conj", (T.ELEMENTWISE,)),
    ("eq ne lt le gt ge", (T.COMPARE,)),
    ("bitwise_and logical_and", (T.AND, T.LOGICAL)),
    ("logical_or logical_not logical_xor bitwise_or bitwise_not bitwise_xor", (T.LOGICAL,)),
    ("mul", (T.AND, T.ELEMENTWISE)),
    ("add sub neg", (T.ELEMENTWISE,)),  # of Python numbers too
    ("clamp clamp_min clamp_max minimum maximum sym_max sym_min", (T.BOUND,)),
    ("floor_divide floordiv", (T.FLOOR_DIVIDE, T.ELEMENTWISE)),
    ("remainder mod", (T.REMAINDER, T.ELEMENTWISE)),
    ("sum", (T.REDUCE, T.SUM, T.ALONG)),
    ("mean amax amin prod any all logsumexp linalg_vector_norm", (T.REDUCE, T.ALONG)),
    ("argmax argmin", (T.REDUCE, T.INDICES, T.ALONG)),
    ("max min", (T.REDUCE, T.INDICES_SECOND, T.ALONG)),
    ("median nanmedian kthvalue mode", (T.INDICES_SECOND, T.ALONG)),
    ("max.other min.other", (T.BOUND, T.ELEMENTWISE)),
    ("var std var_mean std_mean norm", (T.REDUCE, T.ALONG)),
    ("cumsum", (T.SCAN, T.SUM, T.ALONG)),
    ("cumprod logcumsumexp", (T.SCAN, T.ALONG)),
    ("cummax cummin", (T.SCAN, T.INDICES_SECOND, T.ALONG)),
    ("_softmax softmax _safe_softmax", (T.SCAN, T.SOFTMAX, T.ALONG)),
    ("_log_softmax log_softmax", (T.SCAN, T.ALONG)),
    ("sort", (T.SORT, T.INDICES_SECOND, T.ALONG)),
    ("argsort", (T.SORT, T.INDICES, T.ALONG)),
    ("topk", (T.INDICES_SECOND, T.ALONG)),
    ("glu", (T.ALONG,)),
    ("bincount histc", (T.COUNT, T.SUM)),
    ("native_layer_norm layer_norm rms_norm _fused_rms_norm", (T.NORM,)),
    ("native_group_norm", (T.GROUP_NORM,)),
    ("mm addmm linear mv _scaled_mm _int_mm _addmm_activation", (T.MATMUL,)),
    ("bmm baddbmm", (T.MATMUL, T.BATCHED_MATMUL)),
    ("_grouped_mm transformers::grouped_mm_fallback", (T.GROUPED_MATMUL,)),
    ("convolution", (T.CONVOLUTION,)),
    (
        "scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable "
        "python::flex_attention moepass::trie_attention",
        (T.ATTENTION,),
    ),
    ("sym_size sym_numel sym_stride", (T.SIZE, T.SIZES_ONLY)),
    ("sym_storage_offset", (T.SIZES_ONLY,)),
    (
        "_assert_async _assert_scalar _local_scalar_dense aminmax bucketize complex diagonal_copy expand_copy eye "
        "index_fill isin linspace masked_scatter multinomial native_batch_norm nonzero nonzero_static one_hot "
        "permute_copy polar rand rand_like randint randn randn_like randperm range reflection_pad1d repeat_interleave "
        "rsub scatter_reduce searchsorted select_copy slice_copy split_copy split_with_sizes_copy squeeze_copy tensor "
        "transpose_copy tril tril_indices triu triu_indices unbind_copy unique_consecutive unsafe_index "
        "unsafe_index_put unsqueeze_copy view_copy",
        (T.TRAFFIC,),
    ),
)


def _read_table() -> dict[str, frozenset[Trait]]:
    entries = [(name, frozenset(traits)) for names, traits in _TABLE for name in names.split()]
    table = dict(entries)
    if len(table) != len(entries):
        raise ValueError("an operator stands in the table of traits twice")
    return table


_TRAITS = _read_table()

# Views whose schema declares no alias although they share memory with their input, always or for some arguments. The
# list comes from running every operator of torch 2.13 (tests/helpers/graphs/undeclared_views.py).
_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.lift.default,
    aten.dequantize.self,  # of a tensor that is not quantised
}

# Each element of the result is an element of an operand, or a constant: nothing is computed.
MOVES = (
    *(T.COPY, T.RESHAPE, T.PERMUTE, T.EXPAND, T.REPEAT, T.SLICE, T.SPLIT, T.FLIP, T.ROLL, T.LOOKUP, T.WRITE),
    *(T.SLICE_WRITE, T.JOIN, T.CHOOSE, T.PAD, T.ITEM, T.WAIT),
)


@functools.cache
def traits_of(target: object) -> frozenset[Trait]:
    """Return the traits of an operator or Python function; none if it is not in the table."""
    name = _name_of(target)
    overload = name if "." in name else f"{name}.default"
    traits = _TRAITS.get(overload, _TRAITS.get(name.split(".")[0], frozenset()))
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        return traits | {Trait.ELEMENTWISE} if torch.Tag.pointwise in target.tags else traits
    return traits


def has_trait(node: object, *traits: Trait) -> bool:
    """Return whether `node` calls an operator that has one of `traits`."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    return not traits_of(node.target).isdisjoint(traits)


def operation(node: Node) -> str:
    """Return the name of a node's operation with its overload, such as `sum.dim_IntList`, or `view`."""
    return _name_of(node.target)


def base_operation(node: Node) -> str:
    """Return the name of a node's operation without its overload."""
    return operation(node).split(".", 1)[0]


@functools.cache
def _name_of(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        name = name.split("::", 1)[1] if target.namespace in _NAMESPACES else name
        return name if target._overloadname == "default" else f"{name}.{target._overloadname}"
    name = str(getattr(target, "__name__", target))
    return name if getattr(target, "__module__", "") in _MODULES else f"python::{name}"


def is_aten(target: object) -> bool:
    """Return whether `target` is an operator of ATen or of its primitives."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")


def is_pointwise(node: Node) -> bool:
    """Return whether torch says that `node` computes each element from elements at the same position."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def is_view(node: Node) -> bool:
    """Return whether the node's output shares memory with one of its inputs."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or node.target in _UNDECLARED_VIEWS:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def mutates(node: Node) -> bool:
    """Return whether the node writes to one of its inputs."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return schema is not None and bool(schema.is_mutable)


def draws_random_numbers(node: Node) -> bool:
    """Return whether the node's result depends on a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Operators that draw numbers only in training have the tag too, such as attention because of its dropout.
    values = {argument.name: argument.default_value for argument in target._schema.arguments}
    values.update(zip(values, node.args, strict=False))
    values.update(node.kwargs)
    off = values.get("dropout_p") == 0 or values.get("training") is False or values.get("train") is False
    return not off

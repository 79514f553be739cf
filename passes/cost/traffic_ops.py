"""Operators without a tag that only copy, fill, sort, select or reduce, so that they cost their traffic."""

from __future__ import annotations

TRAFFIC_OPS = frozenset({
    "_assert_async", "_assert_scalar", "_fused_rms_norm", "_local_scalar_dense", "_log_softmax", "_safe_softmax",
    "_softmax", "_to_copy", "_unsafe_index", "_unsafe_index_put", "all", "amax", "amin", "aminmax", "any", "arange",
    "argmax", "argmin", "bincount", "bucketize", "cat", "clone", "constant_pad_nd", "convert_element_type", "copy",
    "cummax", "cumprod", "cumsum", "diagonal_copy", "empty", "empty_like", "empty_permuted", "empty_strided",
    "expand_copy", "eye", "fill", "flip", "floor_divide", "full", "full_like", "glu", "histc", "index_add",
    "index_copy", "index_fill", "index_put", "iota", "isin", "lift_fresh_copy", "linalg_vector_norm", "linspace",
    "logcumsumexp", "logsumexp", "masked_fill", "masked_scatter", "max", "mean", "min", "multinomial",
    "native_batch_norm", "native_group_norm", "native_layer_norm", "new_empty", "new_empty_strided", "new_full",
    "new_ones", "new_zeros", "nonzero", "nonzero_static", "norm", "one_hot", "ones", "ones_like", "permute_copy",
    "prod", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "range", "reflection_pad1d", "repeat",
    "repeat_interleave", "resize", "roll", "rsub", "scalar_tensor", "scatter", "scatter_add", "scatter_reduce",
    "searchsorted", "select_copy", "select_scatter", "slice_copy", "slice_scatter", "softmax", "sort", "split_copy",
    "split_with_sizes_copy", "squeeze_copy", "stack", "std", "std_mean", "sum", "sym_size", "tensor", "topk",
    "transpose_copy", "tril", "tril_indices", "triu", "triu_indices", "unbind_copy", "unique_consecutive",
    "unsafe_index", "unsafe_index_put", "unsqueeze_copy", "var", "var_mean", "view_copy", "where", "zeros",
    "zeros_like", "complex", "polar",
})  # fmt: skip

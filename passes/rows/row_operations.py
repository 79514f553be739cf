"""Operations of which it is known what they do with the rows of the experts: see `row_flow.py`.

By the names of `operations.py`, those of `ELEMENTWISE` and `VIEWS` with their variants.
"""

# Element by element, and not tagged so by torch.
ELEMENTWISE = {
    "_to_copy", "convert_element_type", "copy", "alias", "detach", "lift_fresh_copy", "where.ScalarOther",
    "where.ScalarSelf", "where.Scalar", "masked_fill.Tensor", "contiguous", "floor_divide", "hardswish", "hardsigmoid",
    "log_sigmoid", "log_sigmoid_forward", "isinf", "_conj",
}  # fmt: skip
# The same elements in the same order.
VIEWS = {"view", "_unsafe_view", "reshape", "squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze"}
# One number everywhere, in a shape that is given, or in that of another tensor.
MADE = {"zeros", "ones", "full", "scalar_tensor", "new_zeros", "new_ones", "new_full"}
MADE_LIKE = {"zeros_like", "ones_like", "full_like"}
# Along `dim` or `dims` alone; without these, along everything.
ALONG = {
    "sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin", "var", "std", "var_mean",
    "std_mean", "logsumexp", "linalg_vector_norm", "norm", "median", "nanmedian", "kthvalue", "mode", "cumsum",
    "cumprod", "cummax", "cummin", "logcumsumexp", "_softmax", "_safe_softmax", "_log_softmax", "softmax",
    "log_softmax", "sort", "argsort", "topk", "flip", "slice", "select", "split", "split_with_sizes", "unsafe_split",
    "unsafe_split_with_sizes", "chunk", "unbind", "glu", "roll",
}  # fmt: skip
# Along `dim`, several operands with the same rows.
TOGETHER = {"cat", "stack", "gather", "scatter", "scatter_add"}
# Over the last dimensions, as many as `normalized_shape` says.
NORMS = {"native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"}
# Of each row in the first dimension, group by group of its features. Where they say how many rows there are.
GROUP_NORMS = {"native_group_norm": "N"}

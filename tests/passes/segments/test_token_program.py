"""Segments run in chunks of tokens with unchanged results, or report why they do not."""

from __future__ import annotations

import pytest
import torch
from sympy import Integer
from torch.fx import Graph

from moepass.passes.rows.row_layout import Layout, Part
from moepass.passes.segments.token_program import NotByTokenError, TokenDims, TokenFactor, _token_dims
from tests.helpers.graphs.token_models import Forward, TokenModel, chunked, compiled, reasons, token_model


def _time_major(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    return model.mlp(model.embed(ids)).transpose(0, 1)


def _squeezed(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    return model.mlp(model.embed(ids)[:, :, None].squeeze()).softmax(1)


def _learned_positions(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    return model.mlp(model.embed(ids) + model.of_position)


def _mean_over_tokens(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    return model.up(model.mlp(model.embed(ids)).mean(1))


def _token_shift(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    x = model.embed(ids)
    return model.mlp(x + torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0)) + x.roll(1, 1) + x.flip(1))


def _convolution(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    x = model.embed(ids)
    return model.mlp(x + model.convolution(x.transpose(1, 2)).transpose(1, 2))


def _features_for_tokens(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    x = model.mlp(model.embed(ids))
    return model.mlp(x + x.transpose(1, 2).reshape(x.shape))


def _attention(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    x = model.embed(ids)
    heads = model.up(x).unflatten(-1, (2, -1)).transpose(1, 2)
    mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return model.mlp(mixed.transpose(1, 2).flatten(2))


def _attention_of_matrices(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    """Sequences and heads share one dimension before and after attention."""
    x = model.embed(ids)
    heads = model.up(x).unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1)
    mixed = torch.bmm(torch.bmm(heads, heads.transpose(1, 2)).softmax(-1), heads)
    return model.mlp(mixed.unflatten(0, (ids.shape[0], 2)).transpose(1, 2).flatten(2))


def _heads_first(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    x = model.embed(ids)
    heads = model.up(x).unflatten(-1, (2, -1)).permute(2, 0, 1, 3).flatten(0, 1)
    mixed = torch.bmm(torch.bmm(heads, heads.transpose(1, 2)).softmax(-1), heads)
    return model.mlp(mixed.unflatten(0, (2, ids.shape[0])).permute(1, 2, 0, 3).flatten(2))


def _written_side_by_side(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    """Two values of each token are written to memory created in the shape of another tensor."""
    x = model.embed(ids)
    both = x.new_empty(*x.shape[:-1], 2 * model.width)
    both[..., : model.width] = model.up(x)
    both[..., model.width :] = x
    return model.mlp(both.unflatten(-1, (2, -1)).sum(-2))


def _repeated(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    x = model.embed(ids).flatten(0, 1)
    return model.mlp(x.repeat(2, 1)).view(2, -1, x.shape[-1]).sum(0)


SIZES = [
    (3, 6, 8, 1),  # one token at a time
    (3, 6, 8, 4),  # parts of a sequence
    (3, 6, 8, 13),  # several sequences
    (8, 8, 8, 16),  # equal numbers of sequences, tokens and features
    (1, 8, 8, 3),  # one sequence with equal numbers of tokens and features
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("batch", "length", "width", "chunk"), SIZES)
@pytest.mark.parametrize(
    "forward",
    [
        *(_time_major, _squeezed, _learned_positions, _mean_over_tokens, _token_shift, _convolution),
        *(_features_for_tokens, _attention, _attention_of_matrices, _heads_first, _written_side_by_side),
        _repeated,
    ],
)
@pytest.mark.sampled(every=12)
def test_chunks_of_tokens_return_the_same(forward: Forward, batch: int, length: int, width: int, chunk: int) -> None:
    model, ids = token_model(forward, batch, length, width)
    expected = model(ids)
    outputs, compilation = compiled(model, ids, chunk)
    torch.testing.assert_close(outputs, expected)
    assert chunked(compilation) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "forward", [_time_major, _mean_over_tokens, _attention, _attention_of_matrices, _written_side_by_side]
)
def test_sizes_may_be_symbols(forward: Forward) -> None:
    model, ids = token_model(forward)
    expected = model(ids)
    outputs, compilation = compiled(model, ids, 4, dynamic=True)
    torch.testing.assert_close(outputs, expected)
    assert chunked(compilation) > 0


@pytest.mark.slow
def test_as_many_sequences_as_tokens_have_one_symbol() -> None:
    model, ids = token_model(_attention_of_matrices, batch=5, length=5)
    expected = model(ids)
    outputs, compilation = compiled(model, ids, 4, dynamic=True)
    torch.testing.assert_close(outputs, expected)
    assert len(compilation.plan.sizes) == 1
    assert chunked(compilation) > 0


@pytest.mark.slow
def test_sizes_may_have_no_value_before_a_run() -> None:
    model, ids = token_model(_time_major)
    for dim in (0, 1):
        torch._dynamo.decorators.mark_unbacked(ids, dim)
    expected = model(ids)
    outputs, compilation = compiled(model, ids, 4, dynamic=None)
    torch.testing.assert_close(outputs, expected)
    assert chunked(compilation) > 0


def _value_of_each_sequence(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    return model.mlp(model.embed(ids) + model.of_sequence).softmax(1)


def _windows(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    return model.mlp(model.embed(ids).view(ids.shape[0], 2, -1, model.width)).softmax(2)


def _other_sequences(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    return model.mlp(model.embed(ids).view(2, -1, model.width)).softmax(1)


def _memory_for_more_tokens(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    x = model.embed(ids)
    more = x.new_empty(x.shape[0], 2 * x.shape[1], model.width)
    more[:, : x.shape[1]] = x
    more[:, x.shape[1] :] = 1
    return model.mlp(more).softmax(1)


def _one_value_for_all_sequences(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    x = model.embed(ids)
    return model.mlp(torch.bmm(x.permute(1, 2, 0), x.transpose(0, 1)))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_value_of_each_sequence, "has one value for each sequence"),
        (_memory_for_more_tokens, "allocates memory without the dimensions of the tokens"),
        (_windows, "divides the tokens of a sequence"),
        (_other_sequences, "divides"),
        (_one_value_for_all_sequences, "has tokens whose sequences are unknown"),
    ],
)
def test_values_that_depend_on_all_tokens_are_refused(forward: Forward, reason: str) -> None:
    model, ids = token_model(forward, batch=4)
    expected = model(ids)
    outputs, compilation = compiled(model, ids, 4)
    torch.testing.assert_close(outputs, expected)
    assert chunked(compilation) == 0
    assert reason in reasons(compilation)


def _tokens_of(*dimensions: tuple[Part, ...]) -> TokenDims:
    return _token_dims(Graph().placeholder("value"), Layout(dimensions))


def test_chunks_have_one_token_dimension() -> None:
    name = "2 x 3"
    sequences, tokens, everything = Part(Integer(2), ((name, 0),)), Part(Integer(3), ((name, 1),)), Part(Integer(6), ())
    heads = Part(Integer(4))
    assert _tokens_of((sequences, heads), (tokens,), ()).factors == (
        (TokenFactor.SEQUENCES, 4),
        (TokenFactor.TOKENS,),
        (),
    )
    assert _tokens_of((heads, everything)).factors == ((4, TokenFactor.ALL_TOKENS),)
    for places in [((tokens,), (tokens,)), ((everything,), (sequences, tokens)), ((sequences,), (sequences, tokens))]:
        with pytest.raises(NotByTokenError, match="has tokens in several dimensions"):
            _tokens_of(*places)

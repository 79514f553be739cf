"""Parameters and FLOPs of layers and models."""

from __future__ import annotations

from collections.abc import Iterator

from moepass.models.errors import InputError
from moepass.models.formulas.attention import attention_flops
from moepass.models.formulas.sizes import Size
from moepass.models.sizes.architecture import Architecture, Attention, Experts, Layer


def projection_parameters(attention: Attention, hidden: int) -> int:
    """Return the weights of the projections and convolutions of attention, without biases and norms."""
    output = attention.output_width * hidden
    if attention.kind == "state_space":
        inner, states, rank = attention.heads, attention.head_dim, attention.time_step_rank
        # Input and gate; time step, input and output of the states; the time step's second half; the convolution.
        return hidden * 2 * inner + inner * (rank + 2 * states) + rank * inner + inner * attention.convolution + output
    if attention.kind == "linear":
        mixed = 2 * attention.key_width + attention.value_width
        # Queries, keys, values and an output gate; a decay and a step per head; the convolution.
        inputs = hidden * (mixed + attention.value_width) + hidden * 2 * attention.heads
        return inputs + mixed * attention.convolution + output
    return sum(rows * columns for rows, columns in attention_matrices(attention, hidden))


def attention_matrices(attention: Attention, hidden: int) -> Iterator[tuple[int, int]]:
    """Yield (rows, columns) of the projections of softmax attention. Raises InputError for other kinds."""
    if attention.kind in ("linear", "state_space"):
        text = f"the weights of attention of kind {attention.kind!r} cannot be counted; only softmax attention can"
        raise InputError(text, name="kind", value=attention.kind)
    latent = attention.latent
    if latent is None:
        yield attention.query_width * (2 if attention.output_gate else 1), hidden
        yield attention.key_width, hidden
        yield attention.value_width, hidden
    else:
        if latent.query_rank is not None:
            yield latent.query_rank, hidden
        yield attention.query_width, latent.query_rank or hidden
        yield latent.kv_rank + latent.position_dim, hidden
        plain_dim = attention.head_dim - latent.position_dim
        yield attention.kv_heads * (plain_dim + attention.value_head_dim), latent.kv_rank
    yield hidden, attention.output_width


def mlp_parameters(hidden: int, width: int, gated: bool = True) -> int:
    """Return the weights of a feed-forward network: up, down, and the gate if it has one."""
    return (3 if gated else 2) * hidden * width


def expert_parameters(experts: Experts, hidden: int) -> int:
    """Return the parameters of one routed expert, including biases; a bank has `experts.count` times as many."""
    bias = (2 if experts.gated else 1) * experts.width + hidden if experts.bias else 0
    return mlp_parameters(hidden, experts.width, experts.gated) + bias


def _always_read(experts: Experts, hidden: int) -> int:
    """Return the weights of router and shared experts, which every token uses."""
    router = hidden * experts.count
    gate = hidden if experts.shared_gate else 0
    return router + mlp_parameters(hidden, experts.shared_width, experts.gated) + gate


def layer_parameters(layer: Layer, hidden: int) -> int:
    """Return the parameters of a layer."""
    experts = layer.experts
    if experts is None:
        assert layer.dense_width is not None
        block = mlp_parameters(hidden, layer.dense_width)
    else:
        router_bias = experts.count if experts.router_bias else 0
        block = _always_read(experts, hidden) + router_bias + experts.count * expert_parameters(experts, hidden)
    return projection_parameters(layer.attention, hidden) + layer.attention.other_parameters + block + layer.norms


def model_parameters(architecture: Architecture) -> int:
    """Return the parameters of the model; an embedding that is also the head counts once."""
    hidden = architecture.hidden
    layers = sum(count * layer_parameters(layer, hidden) for layer, count in architecture.layer_counts.items())
    tables = architecture.vocab * hidden * (1 if architecture.tied_embeddings else 2)
    return layers + tables + architecture.other_parameters


def flops_per_token(layer: Layer, hidden: int) -> int:
    """Return f, the FLOPs of a layer per token: all GEMMs whose size does not depend on the sequence length.

    2·(projections + H·E router + k·3·H·h routed + 3·H·h shared), or 2·(projections + 3·H·w) for a dense layer.
    """
    weights = projection_parameters(layer.attention, hidden)
    if layer.experts is None:
        assert layer.dense_width is not None
        return 2 * (weights + mlp_parameters(hidden, layer.dense_width))
    experts = layer.experts
    routed = experts.top_k * mlp_parameters(hidden, experts.width, experts.gated)
    return 2 * (weights + _always_read(experts, hidden) + routed)


def flops_behind_attention(layer: Layer, hidden: int) -> int:
    """Return the part of `flops_per_token` after attention: the output projection, and experts or MLP."""
    before = projection_parameters(layer.attention, hidden) - layer.attention.output_width * hidden
    return flops_per_token(layer, hidden) - 2 * before


def layer_flops(layer: Layer, hidden: int, batch: Size, sequence: Size, prefix: Size = 0) -> Size:
    """Return the FLOPs of a layer for `batch` sequences of `sequence` tokens, each after `prefix` cached tokens."""
    weights = batch * sequence * flops_per_token(layer, hidden)
    return weights + attention_flops(layer.attention, batch, sequence, prefix)


def head_flops(architecture: Architecture, positions: Size) -> Size:
    """Return the FLOPs of the logits at `positions` tokens."""
    return 2 * positions * architecture.hidden * architecture.vocab


def model_flops(architecture: Architecture, batch: Size, sequence: Size) -> Size:
    """Return the FLOPs of a forward pass over `batch` sequences with the logits of one position each."""
    layers = sum(
        count * layer_flops(layer, architecture.hidden, batch, sequence)
        for layer, count in architecture.layer_counts.items()
    )
    return layers + head_flops(architecture, batch)

"""`moepass_trie`: an attention function of transformers, and its operator, which reads and writes the cache itself."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moepass.models.errors import InputError
from moepass.runtime.serving.attention.last_layer import attended_before, keep_attended
from moepass.runtime.serving.attention.partial_attention import additive_mask, merge_into, partial_attention
from moepass.runtime.serving.attention.running_step import OwnBatch, RunningStep, the_running_step
from moepass.runtime.serving.attention.survey import AttentionLayer, attention_arguments
from moepass.runtime.serving.attention.trie_parts import EarlierPart
from moepass.runtime.serving.attention.varlen_attention import takes_varlen, varlen_over_calls

TRIE_ATTENTION_NAME = "moepass_trie"

_library = torch.library.Library("moepass", "FRAGMENT")
_library.define(
    "trie_attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scaling, float softcap) "
    "-> Tensor"
)


def trie_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Return attention [1, n, heads, value_dim] over the trie of the running step, and store its new cache blocks.

    `query` is [1, heads, n, key_dim], `key` [1, kv_heads, n, key_dim], `value` [1, kv_heads, n, value_dim], and `sinks`
    the logits [heads] of the attention sinks, or None. `scaling` is the factor of the scores, and `softcap` their
    limit, 0 for none.

    Raises MoepassError if no step is running, and InputError if the tensors do not have its tokens.
    """
    step = the_running_step()
    attention_layer = step.layer(layer)
    if query.shape[:1] + query.shape[2:3] != (1, step.step.count):
        raise InputError(
            f"layer {layer} has queries of {query.shape[0]} sequences of {query.shape[2]} tokens; the running step is "
            f"one stream of {step.step.count}",
            name=f"layer {layer}",
        )
    if step.memory is not None and step.step.stored:
        rows = (tensor[0].transpose(0, 1) for tensor in (key, value))
        step.memory.write(attention_layer.cache_index, step.stored_blocks, step.stored_positions, *rows)
    if attention_layer.temperature is not None:
        query = query * attention_layer.temperature.correction(step.depth)[:, None].to(query.dtype)
    calls = step.calls(attention_layer) if takes_varlen(query, value, softcap) else None
    if calls is None:
        output, log_sum_exp = _over_parts(step, attention_layer, query, key, value, scaling, softcap)
    else:
        memory, index = step.memory, attention_layer.cache_index
        read_cached = None if memory is None else functools.partial(memory.read_slots, index)
        output, log_sum_exp = varlen_over_calls(calls, query, key, value, read_cached, scaling)
    if sinks is not None:
        # A sink is one more key with the value 0.
        output.mul_(torch.sigmoid(log_sum_exp - sinks.float()[:, None]).unsqueeze(-1))
    return output.transpose(1, 2).to(query.dtype).contiguous()


def _over_parts(
    step: RunningStep,
    attention_layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, heads, tokens, _ = query.shape
    value_dim = value.shape[-1]
    prepared = step.prepared(attention_layer)
    output = query.new_empty(1, tokens, heads, value_dim, dtype=torch.float32).transpose(1, 2)
    log_sum_exp = query.new_empty(1, tokens, heads, dtype=torch.float32).transpose(1, 2)

    # The tensors of a part are freed when its function returns, before those of the next part are made.
    def add_own(own_batch: OwnBatch) -> None:
        rows = own_batch.rows
        if isinstance(rows, slice):
            queries, keys, values = query[:, :, rows], key[:, :, rows], value[:, :, rows]
        else:
            queries, keys, values = (tensor[0].transpose(0, 1)[rows].transpose(1, 2) for tensor in (query, key, value))
        mask = own_batch.mask
        if own_batch.keys is not None:
            assert isinstance(rows, slice)
            keys, values = key[:, :, own_batch.keys], value[:, :, own_batch.keys]
            mask = step.mask_between(rows, own_batch.keys, prepared.first_seen)
        own_output, sums = partial_attention(queries, keys, values, scaling, softcap, mask is None, mask)
        if own_batch.result_indices is None or own_batch.positions is None:
            output[:, :, rows], log_sum_exp[:, :, rows] = own_output, sums
        else:
            token_results = own_output.transpose(1, 2).flatten(0, 1)[own_batch.result_indices]
            output[0].transpose(0, 1)[own_batch.positions] = token_results.float()
            log_sum_exp[0].T[own_batch.positions] = sums.transpose(1, 2).flatten(0, 1)[own_batch.result_indices]

    def add_chain(context: int, parts: Iterable[EarlierPart]) -> None:
        all_keys, all_values, depth = key, value, step.depth
        if context >= 0:
            assert step.memory is not None
            cached = step.memory.read(attention_layer.cache_index, step.contexts[context])
            all_keys, all_values = (tensor.transpose(0, 1)[None] for tensor in cached)
            depth = torch.arange(all_keys.shape[2], device=key.device)
        for earlier in parts:
            add_earlier(earlier, all_keys, all_values, depth)

    def add_earlier(
        earlier: EarlierPart, all_keys: torch.Tensor, all_values: torch.Tensor, depth: torch.Tensor
    ) -> None:
        rows, columns = slice(earlier.start, earlier.end), slice(earlier.key_start, earlier.key_end)
        mask = None
        if not earlier.sees_all:
            mask = additive_mask(depth[columns] >= prepared.first_seen[rows, None])[None]
        keys, values = all_keys[:, :, columns], all_values[:, :, columns]
        with_earlier = partial_attention(query[:, :, rows], keys, values, scaling, softcap, False, mask)
        merge_into(output[:, :, rows], log_sum_exp[:, :, rows], with_earlier)

    for own_batch in prepared.own:
        add_own(own_batch)
    # Parts over one chain of cached blocks are adjacent, behind those of the stream.
    for context, parts in itertools.groupby(prepared.earlier, key=operator.attrgetter("context")):
        add_chain(context, parts)
    return output, log_sum_exp


def _fake_trie_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any) -> torch.Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


_library.impl("trie_attention", trie_attention, "CompositeExplicitAutograd")
torch.library.register_fake("moepass::trie_attention", _fake_trie_attention, lib=_library)


def trie_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over the trie of the running step. transformers calls this in each attention layer."""
    attended = attended_before(module)
    if attended is not None:
        return attended, None
    sinks, scaling, softcap = attention_arguments(module, query, arguments)
    if attention_mask is not None:
        raise InputError("attention over a trie takes no mask; call the model with attention_mask=None", name="mask")
    output = torch.ops.moepass.trie_attention(query, key, value, sinks, module.layer_idx, scaling, softcap)
    keep_attended(module, output)
    return output, None


def no_mask(**_: Any) -> None:
    """Return None, because the trie determines which tokens a token attends to."""


ALL_ATTENTION_FUNCTIONS.register(TRIE_ATTENTION_NAME, trie_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(TRIE_ATTENTION_NAME, no_mask)

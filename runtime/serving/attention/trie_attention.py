"""`moepass_trie`: the attention function of transformers, and the operator behind it.

The operator `moepass::trie_attention` reads and writes the cache inside, so a captured graph is not cut where a step
has cached prefixes and holds nothing of a step but its tensors. Which trie they belong to says `running_step`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moepass.models import formulas
from moepass.models.errors import InputError
from moepass.runtime.serving.attention.attention_layers import AttentionLayer, attention_arguments
from moepass.runtime.serving.attention.last_layer import attended_before, keep_attended
from moepass.runtime.serving.attention.partial_attention import additive_mask, merge_into, partial_attention
from moepass.runtime.serving.attention.running_step import PreparedCalls, RunningStep, the_running_step
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
    """query [1, heads, n, key_dim], key [1, kv_heads, n, key_dim], value [1, kv_heads, n, value_dim], sinks [heads].

    Gives [1, n, heads, value_dim]. Blocks that the step stores are written. Raises MoepassError outside of a step, and
    InputError where the tensors have not the tokens of the running one.
    """
    step = the_running_step()
    known = step.layer(layer)
    if query.shape[:1] + query.shape[2:3] != (1, step.step.count):
        raise InputError(
            f"layer {layer} attends from {query.shape[0]} sequences of {query.shape[2]} tokens; the step is one stream "
            f"of {step.step.count}",
            name=f"layer {layer}",
            value=tuple(query.shape),
            expected=step.step.count,
        )
    if step.memory is not None and step.step.stored:
        rows = (one[0].transpose(0, 1) for one in (key, value))
        step.memory.write(known.cache_index, step.stored_blocks, step.stored_positions, *rows)
    if known.temperature is not None:
        query = query * known.temperature.correction(step.depth)[:, None].to(query.dtype)
    calls = step.calls(known.past) if takes_varlen(query, value, softcap) else None
    if calls is None:
        output, log_sum_exp = _over_parts(step, known, query, key, value, scaling, softcap)
    else:
        output, log_sum_exp = _over_calls(step, known, calls, query, key, value, scaling)
    if sinks is not None:
        # A sink is one more key, of which the value is 0.
        output.mul_(torch.sigmoid(log_sum_exp - sinks.float()[:, None]).unsqueeze(-1))
    return output.transpose(1, 2).to(query.dtype).contiguous()


def _over_calls(
    step: RunningStep,
    known: AttentionLayer,
    calls: PreparedCalls,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    step.attention_flops += calls.pairs * formulas.score_flops(1, query.shape[1], query.shape[-1], value.shape[-1])
    cached = None
    if step.contexts:
        assert step.memory is not None
        cached = step.memory.read(known.cache_index, torch.cat(step.contexts))
    return varlen_over_calls(calls.calls, query, key, value, cached, scaling)


def _over_parts(
    step: RunningStep,
    known: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, heads, tokens, key_dim = query.shape
    value_dim = value.shape[-1]
    pair_flops = formulas.score_flops(1, heads, key_dim, value_dim)
    prepared = step.prepared(known.past, pair_flops)
    step.attention_flops += prepared.pairs * pair_flops
    output = query.new_empty(1, tokens, heads, value_dim, dtype=torch.float32).transpose(1, 2)
    log_sum_exp = query.new_empty(1, tokens, heads, dtype=torch.float32).transpose(1, 2)
    for own in prepared.own:
        rows = own.rows
        if isinstance(rows, slice):
            queries, keys, values = query[:, :, rows], key[:, :, rows], value[:, :, rows]
        else:
            queries, keys, values = (one[0].transpose(0, 1)[rows].transpose(1, 2) for one in (query, key, value))
        mask = own.mask
        if own.keys is not None:
            assert isinstance(rows, slice)
            keys, values = key[:, :, own.keys], value[:, :, own.keys]
            mask = step.mask_between(rows, own.keys, prepared.first_seen)
        found, sums = partial_attention(queries, keys, values, scaling, softcap, mask is None, mask)
        if own.kept is None or own.places is None:
            output[:, :, rows], log_sum_exp[:, :, rows] = found, sums
        else:
            output[0].transpose(0, 1)[own.places] = found.transpose(1, 2).flatten(0, 1)[own.kept].float()
            log_sum_exp[0].T[own.places] = sums.transpose(1, 2).flatten(0, 1)[own.kept]
    cached = _CachedContexts(step, known.cache_index)
    for part in prepared.earlier:
        keys, values, depth = (key, value, step.depth) if part.context < 0 else cached.read(part.context)
        rows, columns = slice(part.start, part.end), slice(part.key_start, part.key_end)
        mask = None
        if not part.sees_all:
            mask = additive_mask(depth[columns] >= prepared.first_seen[rows, None])[None]
        keys, values = keys[:, :, columns], values[:, :, columns]
        other = partial_attention(query[:, :, rows], keys, values, scaling, softcap, False, mask)
        merge_into(output[:, :, rows], log_sum_exp[:, :, rows], other)
    return output, log_sum_exp


class _CachedContexts:
    """Keys, values and depths of chains of cached blocks. One chain at a time is in memory twice."""

    def __init__(self, step: RunningStep, cache_index: int) -> None:
        self.step, self.cache_index = step, cache_index
        self.context = -1

    def read(self, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if context != self.context:
            assert self.step.memory is not None
            keys, values = self.step.memory.read(self.cache_index, self.step.contexts[context])
            self.keys, self.values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
            self.depth = torch.arange(len(keys), device=keys.device)
            self.context = context
        return self.keys, self.values, self.depth


def _fake_trie_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
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
    """What transformers calls in each attention layer. Raises InputError for what it cannot compute over a trie."""
    known = attended_before(module)
    if known is not None:
        return known, None
    found = attention_arguments(module, arguments)
    if attention_mask is not None:
        raise InputError("attention over a trie takes no mask; call the model with attention_mask=None", name="mask")
    output = torch.ops.moepass.trie_attention(
        query, key, value, found.sinks, module.layer_idx, found.scaling(query), found.softcap
    )
    keep_attended(module, output)
    return output, None


def no_mask(**_: Any) -> None:
    """The mask function beside it: the trie is the mask."""


def register() -> None:
    """Make `moepass_trie` known to transformers. Once more does no harm."""
    ALL_ATTENTION_FUNCTIONS.register(TRIE_ATTENTION_NAME, trie_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(TRIE_ATTENTION_NAME, no_mask)


register()

"""A survey of a model's attention layers from one short forward pass, or why a trie cannot run on the model."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moepass.models.errors import InputError
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.cache.block_memory import KeyValueShape

# Windows and chunks are recognised up to this number of tokens.
FARTHEST = 1 << 20

_SURVEY_NAME = "moepass_survey"
_TOKENS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Temperature:
    """The position-dependent scale of queries in Llama 4: 1 + scale · log(1 + floor((position + 1) / floor_scale)).

    The model's code uses the index in the stream as the position, which `correction` undoes.
    """

    scale: float
    floor_scale: float

    def correction(self, depth: torch.Tensor) -> torch.Tensor:
        """Return the factors [n] by which queries must be multiplied, so that each has the scale of its depth."""
        target_scale, applied_scale = (
            self._factor(positions) for positions in (depth, torch.arange(len(depth), device=depth.device))
        )
        return target_scale / applied_scale

    def _factor(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.floor_scale)) * self.scale + 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention layer of a model; `cache_index` is its index in the memory of blocks.

    `softcap` is the limit of its scores, 0 for none.
    """

    cache_index: int
    heads: int
    shape: KeyValueShape
    past: VisiblePast
    temperature: Temperature | None = None
    softcap: float = 0.0


# Arguments that repeat the mask or do not change the result. All others must be None or False.
_WITHOUT_EFFECT = frozenset(
    {
        *("sliding_window", "position_ids", "use_cache", "return_dict", "cache_position", "output_attentions"),
        *("output_hidden_states", "output_router_logits", "logits_to_keep", "position_embeddings"),
    }
)


def attention_arguments(
    module: torch.nn.Module, query: torch.Tensor, arguments: Mapping[str, Any]
) -> tuple[torch.Tensor | None, float, float]:
    """Return the arguments that transformers passes to an attention function and that change its result.

    They are the logits [heads] of the attention sinks, None for none, the factor of the scores, and their limit, 0 for
    none. Raises InputError if attention over a trie does not support an argument.
    """
    scale, softcap = arguments.get("scaling"), arguments.get("softcap")
    supported = {"scaling", "softcap", "s_aux", "dropout", "is_causal", *_WITHOUT_EFFECT}
    for name, value in arguments.items():
        if name not in supported and value is not None and value is not False:
            text = f"attention is called with {name}, which attention over a trie does not support"
            raise InputError(text, name=name, expected=sorted(supported))
    for name, value in (("scaling", scale), ("softcap", softcap)):
        if value is not None and not isinstance(value, (int, float)):
            text = f"attention is called with {name} of type {type(value).__name__}; it must be a number"
            raise InputError(text, name=name, expected="a number")
    if arguments.get("dropout"):
        raise InputError(f"attention has a dropout of {arguments['dropout']}; call model.eval()", name="dropout")
    is_causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise InputError("attention is not causal: tokens see later tokens", name="is_causal")
    return arguments.get("s_aux"), query.shape[-1] ** -0.5 if scale is None else scale, float(softcap or 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSurvey:
    """The attention layers of a model. `refusal` is the reason why a step cannot be a trie, or None.

    If all positions are below `position_limit`, the model's rotary positions of a token do not depend on the other
    tokens of the step. None for no limit. `last` is the module that calls attention last.
    """

    layers: Mapping[int, AttentionLayer]
    refusal: str | None
    position_limit: int | None
    last: torch.nn.Module | None = dataclasses.field(default=None, compare=False)

    @property
    def shapes(self) -> tuple[KeyValueShape, ...]:
        """Shapes of the keys and values of all layers, as `BlockMemory` needs them."""
        return tuple(layer.shape for layer in self.layers.values())


def survey_attention(model: PreTrainedModel) -> AttentionSurvey:
    """Return the attention layers of `model`, from one eager forward pass of a few tokens without experts and head.

    The model is left unchanged. The pass reads no expert weights, so it works with any home of the experts, and for a
    model on the device `meta`.
    """
    refusal = _refusal_without_a_pass(model)
    records = _Records()
    if refusal is None:
        with functions_set_to(model, _SURVEY_NAME, _SURVEY_NAME), _OneSequence():
            token = _recording.set(records)
            try:
                ids = torch.arange(3, 3 + _TOKENS, device=model.device)[None]
                with torch.no_grad():
                    model.base_model(input_ids=ids, use_cache=False, attention_mask=None)
            except InputError as error:
                refusal = str(error)
            finally:
                _recording.reset(token)
    config = model.config.get_text_config()
    missing = sorted(set(range(config.num_hidden_layers)) - set(records.layers))
    if refusal is None and missing:
        kinds = getattr(config, "layer_types", None) or ()
        named = sorted({kinds[number] for number in missing if number < len(kinds)})
        refusal = f"layers {missing} have no attention that can be replaced: {', '.join(named) or 'unknown'}"
    return AttentionSurvey(dict(sorted(records.layers.items())), refusal, _position_limit(config), records.last)


@contextlib.contextmanager
def functions_set_to(model: PreTrainedModel, attention: str, experts: str | None = None) -> Iterator[None]:
    """Use the functions of attention and experts registered under these names for `model` in the block."""
    with contextlib.ExitStack() as stack:
        stack.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(attention)
        if experts is not None and model._can_set_experts_implementation():
            stack.callback(model.set_experts_implementation, model.config._experts_implementation)
            model.set_experts_implementation(experts)
        yield


class _OneSequence(TorchFunctionMode):
    """Answers on the device `meta`, where values are unknown, that positions belong to one sequence."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__ and args[0].device.type == "meta":
            return True
        return func(*args, **(kwargs or {}))


class _Records:
    """Records of one pass. Only the recording thread sees them, so that other models can run at the same time."""

    def __init__(self) -> None:
        self.layers: dict[int, AttentionLayer] = {}
        self.last: torch.nn.Module | None = None
        self.masks: list[tuple[torch.Tensor, VisiblePast | InputError]] = []

    def past_of(self, mask: torch.Tensor | None) -> VisiblePast:
        if mask is None:  # without a mask, attention is causal
            return VisiblePast()
        for recorded_mask, past in self.masks:
            if recorded_mask is mask:
                if isinstance(past, InputError):
                    raise past
                return past
        text = "attention gets a mask that transformers' mask functions did not create, so what it hides is unknown"
        raise InputError(text, name="mask")


_recording: contextvars.ContextVar[_Records] = contextvars.ContextVar("moepass_attention_survey")


def _survey_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    records = _recording.get()
    _, _, softcap = attention_arguments(module, query, arguments)
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int):
        raise InputError(f"{type(module).__name__} has no layer_idx, the index of its layer", name="layer_idx")
    if number in records.layers:
        raise InputError(f"layer {number} calls attention more than once", name=f"layer {number}")
    if query.shape[2] != key.shape[2] or query.shape[0] != 1:
        raise InputError(
            f"layer {number} has {query.shape[2]} queries and {key.shape[2]} keys; trie attention needs one of each "
            "per token",
            name=f"layer {number}",
        )
    shape = KeyValueShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
    past = records.past_of(attention_mask)
    records.last = module
    temperature = None
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False):
        # Llama 4's layers without rotary positions.
        temperature = Temperature(float(module.attn_scale), float(module.floor_scale))  # type: ignore[arg-type]
    records.layers[number] = AttentionLayer(len(records.layers), query.shape[1], shape, past, temperature, softcap)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _survey_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any, **options: Any
) -> torch.Tensor:
    # Each call returns a new tensor, because layers are matched with masks by identity.
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    chunk = getattr(options.get("config"), "attention_chunk_size", None)
    is_meta = torch.device(device).type == "meta"
    past: VisiblePast | InputError
    try:
        past = past_of_rule(mask_function, "cpu" if is_meta else device)
    except InputError as error:
        past = error  # raised later if a layer uses the mask
    except RuntimeError:
        # Only the rule of chunks contains a tensor, the padding, whose values are unknown on the device `meta`.
        if not is_meta or not chunk:
            raise
        past = VisiblePast(chunk=chunk)
    _recording.get().masks.append((mask, past))
    return mask


def _no_experts(module: torch.nn.Module, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros_like(hidden_states)


ALL_ATTENTION_FUNCTIONS.register(_SURVEY_NAME, _survey_forward)
ALL_EXPERTS_FUNCTIONS.register(_SURVEY_NAME, _no_experts)
ALL_MASK_ATTENTION_FUNCTIONS.register(_SURVEY_NAME, _survey_mask)


def past_of_rule(rule: Callable[..., Any], device: torch.device | str = "cpu") -> VisiblePast:
    """Return the past that a mask function of transformers, `rule(batch, head, query, key) -> bool`, lets a token see.

    `device` is that of the tensors in the rule. Raises InputError if the past is neither complete nor a window nor
    chunks.
    """
    first = _first_seen(rule, FARTHEST, device)
    before = _first_seen(rule, first - 1, device) if first else 0
    queries = (0, 1, 2, 3, 1000, first, first + 1, max(first - 1, 0), FARTHEST // 3, FARTHEST)
    first_seen = [_first_seen(rule, query, device) for query in queries]
    for past in (VisiblePast(), VisiblePast(window=FARTHEST - first + 1), VisiblePast(chunk=first - before)):
        if past.first_seen(np.asarray(queries)).tolist() == first_seen:
            return past
    text = "attention has a mask that is neither causal nor a sliding window nor chunks of the past"
    raise InputError(text, name="mask")


def _first_seen(rule: Callable[..., Any], query: int, device: torch.device | str) -> int:
    """Return the first key that `query` sees.

    Raises InputError if it does not see all keys from there to itself, or sees later keys.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(query + 2, device=device)
    try:
        row = torch.as_tensor(rule(zero, zero, zero + query, keys)).expand(query + 2)
    except IndexError as error:
        text = "attention has a mask that depends on the inputs; only fixed masks work"
        raise InputError(text, name="mask") from error
    seen = int(row.sum())
    first = query + 1 - seen
    if first < 0 or not bool(row[first : query + 1].all()):
        text = f"token {query} does not see itself and the tokens right before it, or sees later tokens"
        raise InputError(text, name="mask")
    return first


def _refusal_without_a_pass(model: PreTrainedModel) -> str | None:
    if not model._can_set_attn_implementation():
        return f"{type(model).__name__} computes its attention itself; transformers cannot replace it"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids: positions are taken from the order of the stream"
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            return f"{name} is a convolution over tokens, which mixes neighbours of the stream"
    return None


def _position_limit(config: Any) -> int | None:
    """Return the position beyond which the rotations of a whole pass depend on its longest sequence, or None."""
    name = "original_max_position_embeddings"
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = [
        rope.get(name) or getattr(config, name, None) or config.max_position_embeddings
        for rope in (parameters, *(nested for nested in parameters.values() if isinstance(nested, dict)))
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)

"""Build a randomly initialised Transformers model of which every weight is non-trivial.

Transformers initialises biases with zeros, norms with ones and some routing tensors not at all; a model built that way
hides mistakes in bias, sink or norm handling.  Here every parameter and every routing buffer is drawn from one seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

# State-space and decay tensors: only values near the family's own initial values keep the recurrence stable.
_KEPT_LEAVES = frozenset({"A_log", "dt_bias", "D", "decay"})

# Persistent float buffers with these words in their name take part in routing like a parameter does.
_ROUTING_BUFFERS = ("correction_bias", "expert_bias", "router_bias", "balancing_bias")


class TinyModelUnavailableError(RuntimeError):
    """A family of the installed Transformers of which no tiny model can be built or run; the message says why."""


def build_tiny(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    experts_implementation: str,
    seed: int,
) -> PreTrainedModel:
    """Build ``model_class(config)`` with weights drawn from ``seed``, in eval mode and without a key-value cache.

    Args:
        model_class: a ``PreTrainedModel`` subclass.
        config: its configuration; changed in place (cache off, implementations and dtype set).
        dtype: floating point type of the weights; tensors that the family keeps in float32 stay in float32,
            as ``from_pretrained`` would have it.
        experts_implementation: a name of the Transformers experts interface, such as ``"grouped_mm"``; of no
            effect on a family that does not use that interface.
        seed: the same seed gives the same weights; the global random state is neither used nor changed.

    Returns:
        The model, on the CPU, with gradients off for every parameter.

    Raises:
        ValueError: Transformers does not know ``experts_implementation``.
    """
    for nested in _config_tree(config):
        nested.use_cache = False
    options: dict[str, Any] = {"dtype": dtype}
    if model_class._can_set_experts_implementation():
        options["experts_implementation"] = experts_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = model_class._from_config  # not annotated by Transformers
        model: PreTrainedModel = build(config, **options)
    _keep_strict_float32(model, dtype)
    draw_weights(model, seed)
    model.requires_grad_(False)
    model.train(False)
    return model


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Overwrite all parameters and routing buffers of ``model`` in place with deterministic non-constant values.

    Matrices are normal with a standard deviation of one over the square root of their fan-in, biases and sinks are
    normal around 0, norm scales normal around 1.  Tied parameters are drawn once.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in _drawn_tensors(model):
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.copy_(_value(name, tensor, noise))


def _drawn_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Sorted: the values must not depend on the order in which a family registers its modules.
    yield from sorted(model.named_parameters())
    for name, buffer in sorted(model.named_buffers()):
        if buffer.is_floating_point() and any(word in name for word in _ROUTING_BUFFERS):
            yield name, buffer


def _value(name: str, tensor: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    leaf = name.rsplit(".", 1)[-1]
    if leaf in _KEPT_LEAVES:
        return tensor.float() + 0.05 * noise
    if "norm" in name and leaf in ("weight", "scale") and tensor.ndim == 1:
        return 1.0 + 0.1 * noise
    if leaf.endswith("bias") or tensor.ndim < 2:
        return 0.1 * noise
    fan_in = math.prod(tensor.shape[1:]) if "conv" in name else tensor.shape[-1]
    return noise / math.sqrt(fan_in)


def _keep_strict_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    if dtype not in (torch.float16, torch.bfloat16):
        return
    patterns = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(pattern in name for pattern in patterns):
            tensor.data = tensor.data.float()


def _config_tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for key in config.sub_configs:
        nested = getattr(config, key, None)
        if isinstance(nested, PreTrainedConfig):
            yield from _config_tree(nested)

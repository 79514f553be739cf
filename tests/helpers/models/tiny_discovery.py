"""Find the families of the installed Transformers that use its experts interface, and shrink their configurations."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tests.helpers.models.tiny_build import TinyModelUnavailableError, build_tiny

_DECORATOR = "use_experts_implementation"

# Families whose tiny text model cannot be built or run, with the reason.
UNAVAILABLE_FAMILIES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class ExpertsClass:
    """A class of expert weights and the layout that its decorator states."""

    name: str
    is_concatenated: bool = True
    is_transposed: bool = False
    has_bias: bool = False
    has_gate: bool = True
    has_post_expert_norm: bool = False


@dataclass(frozen=True)
class ExpertFamily:
    """A family found in the installed Transformers.

    Attributes:
        name: its folder in ``transformers.models``, mostly the model type too.
        module: full name of its modeling module.
        experts: its classes of expert weights.
        model_class: name of the text model to build, a causal language model where there is one.
    """

    name: str
    module: str
    experts: tuple[ExpertsClass, ...]
    model_class: str

    def load(self) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
        """Import the family.

        Returns:
            The model class and the class of its configuration.

        Raises:
            ImportError: a package that the family needs is not installed.
        """
        model_class = getattr(importlib.import_module(self.module), self.model_class)
        return model_class, model_class.config_class


# Values of a tiny configuration, set if the family's default configuration has the attribute (and not None).
_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "dense_intermediate_size": 64,
        "moe_intermediate_size": 32,
        "moe_hidden_size": 32,
        "shared_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "shared_experts_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "first_k_dense_replace": 1,
        "num_dense_layers": 1,
        "prefix_dense_intermediate_size": 64,
        "sliding_window": 4,
        "sliding_window_size": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_dt_rank": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "block_size": 8,
        "router_hidden_size": 32,
        "use_mamba_kernels": False,
        # A scan that Transformers takes under torch.compile only; it adds in another order than the eager loop does.
        "use_associative_scan": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eod_token_id": 2,
        "sep_token_id": 2,
    }
)

# Values that are set even if the default is None, because a family without them would have no experts.
_EXPERTS: Mapping[str, int] = MappingProxyType(
    {
        "num_experts": 8,
        "num_local_experts": 8,
        "n_routed_experts": 8,
        "moe_num_experts": 8,
        "num_experts_per_tok": 2,
        "num_experts_per_token": 2,
        "moe_topk": 2,
        "moe_k": 2,
        "top_k_experts": 2,
        "n_shared_experts": 1,
        "num_shared_experts": 1,
        "moe_num_shared_experts": 1,
    }
)

# One entry per layer; the first attribute whose entry names a kind of layer decides the number of layers.
_PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type")

# Gemma's last layer must be one of full attention, and its experts are off by default.
_GEMMA: Mapping[str, Any] = MappingProxyType(
    {
        "moe_intermediate_size": 32,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
)

# Exceptions from the general rule, by family.
_OVERRIDES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # The last layers read earlier ones.
        "beam": {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
        },
        "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse"], "layer_types": ["full_attention"] * 3},
        "diffusion_gemma": _GEMMA,
        # Sliding layers have latent attention of another size, given by keywords that are not attributes.
        "dots3_note": {
            "head_dim": 24,
            **{f"swa_{key}": _SIZES[key] for key in ("num_attention_heads", "q_lora_rank", "kv_lora_rank")},
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 24,
            "swa_v_head_dim": 16,
            "swa_qk_nope_head_dim": 16,
            "swa_qk_rope_head_dim": 8,
        },
        # Two widths: text experts and vision experts.
        "ernie4_5_vl_moe": {
            "moe_intermediate_size": [32, 16],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]},
        },
        "gemma4": {
            **_GEMMA,
            "enable_moe_block": True,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
        },
        "flint": {"layer_types": ["full_attention", "sliding_attention"] * 2},  # every other layer has experts
        "glm4v_moe": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            }
        },
        "glm5_next": {"index_kpool": 4},
        "hunyuan_v1_moe": {"head_dim": 16, "intermediate_size": 32},
        "jamba": {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
        "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"]},
        "qwen4_exp": {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        },
        "zaya": {"num_experts_per_tok": 1},  # the only value that the family takes
    }
)


@lru_cache(maxsize=1)
def _scan() -> tuple[ExpertFamily, ...]:
    root = Path(transformers.__file__).parent / "models"
    families = []
    for path in sorted(root.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if f"@{_DECORATOR}" not in source:
            continue  # parsing is the slow part
        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        experts = tuple(experts_class for node in classes if (experts_class := _experts_class(node)) is not None)
        if not experts:
            continue
        families.append(
            ExpertFamily(
                name=path.parent.name,
                module=f"transformers.models.{path.parent.name}.{path.stem}",
                experts=experts,
                model_class=_model_class(node.name for node in classes),
            )
        )
    return tuple(families)


def discover_expert_families() -> list[ExpertFamily]:
    """Every family of the installed Transformers with a class under ``@use_experts_implementation``, by name.

    The source files are read and parsed, not imported, so a family whose own requirements are missing is listed too.
    """
    return list(_scan())


def discovered_tiny_model(
    record: ExpertFamily,
    *,
    dtype: torch.dtype = torch.float32,
    experts_implementation: str = "grouped_mm",
    seed: int = 0,
    **config_overrides: Any,
) -> PreTrainedModel:
    """Build a tiny text model of a discovered family: its default configuration, shrunk.

    Args:
        record: from ``discover_expert_families``.
        dtype: type of the weights; what the family always keeps in float32 stays in float32.
        experts_implementation: ``"eager"``, ``"grouped_mm"`` or ``"batched_mm"``.
        seed: the same seed gives the same weights.
        config_overrides: attributes of the family's text configuration.

    Returns:
        The model in eval mode on the CPU, cache off.  Its output has ``.logits`` or, for a family without a text
        model with a head, ``.last_hidden_state``.

    Raises:
        TinyModelUnavailableError: no model of this family can be built; the message says why.
    """
    if reason := UNAVAILABLE_FAMILIES.get(record.name):
        raise TinyModelUnavailableError(f"{record.name}: {reason}")
    try:
        model_class, config_class = record.load()
        config = config_class(**{**_shrunk(record.name, config_class), **config_overrides})
        return build_tiny(model_class, config, dtype=dtype, experts_implementation=experts_implementation, seed=seed)
    except Exception as error:  # an unknown family may raise anything; the caller gets one type
        raise TinyModelUnavailableError(f"{record.name}: {type(error).__name__}: {error}") from error


def _shrunk(name: str, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    default = vars(config_class())
    tiny = {key: value for key, value in _SIZES.items() if default.get(key) is not None and default[key] != 0}
    tiny.update({key: value for key, value in _EXPERTS.items() if key in default})
    if not any("moe" in key and "size" in key for key in tiny):
        tiny["intermediate_size"] = 32  # the width of an expert
    if "kv_lora_rank" in default:
        tiny.pop("head_dim", None)  # latent attention: follows from the parts
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    for groups in ("n_group", "num_expert_group"):
        if (default.get(groups) or 1) > 1:
            tiny.update({groups: 4, "topk_group": 2})
    kinds = {key: list(dict.fromkeys(default[key])) for key in _PER_LAYER if default.get(key)}
    layers = max([3, *(len(kind) for kind in kinds.values())])
    tiny["num_hidden_layers"] = layers
    for key, kind in kinds.items():
        # Attention alternates; the dense layers of an MLP pattern come first, all others are alike.
        cycle = key == "layer_types"
        tiny[key] = [kind[i % len(kind)] if cycle else kind[min(i, len(kind) - 1)] for i in range(layers)]
    tiny.update(_OVERRIDES.get(name, {}))
    for key in _PER_LAYER:
        if key in _OVERRIDES.get(name, {}):
            tiny["num_hidden_layers"] = len(tiny[key])
    return tiny


def _experts_class(node: ast.ClassDef) -> ExpertsClass | None:
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        target = call.func if call else decorator
        if isinstance(target, ast.Name) and target.id == _DECORATOR:
            flags = {word.arg: ast.literal_eval(word.value) for word in (call.keywords if call else ()) if word.arg}
            fields = ExpertsClass.__dataclass_fields__
            return ExpertsClass(node.name, **{key: value for key, value in flags.items() if key in fields})
    return None


def _model_class(names: Iterable[str]) -> str:
    text = [name for name in names if not any(word in name for word in ("Vision", "Audio", "Talker", "Code2Wav"))]
    for ending in ("ForCausalLM", "TextModel", "ForTokenClassification", "ForConditionalGeneration", "Model"):
        for name in text:
            if name.endswith(ending) and not name.endswith("PreTrainedModel"):
                return name
    return ""

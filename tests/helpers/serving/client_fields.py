"""The fields that clients and other servers define for moepass's routes, by type of body.

Fields of installed clients are read from these clients. Those of servers that are not installed are listed by hand; the
comments name the files that define them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints
from unittest import mock

import cohere
from huggingface_hub import InferenceClient
from openai.types import completion_create_params, decision_create_params, embedding_create_params
from openai.types.chat import chat_completion_message_param
from openai.types.chat import completion_create_params as chat_create_params

Fields = frozenset[str]

_OPENAI: dict[str, tuple[Any, ...]] = {
    "CompletionBody": (completion_create_params.CompletionCreateParamsNonStreaming,),
    "ChatBody": (chat_create_params.CompletionCreateParamsNonStreaming,),
    "ChatMessage": chat_completion_message_param.ChatCompletionMessageParam.__args__,  # type: ignore[attr-defined]
    "EmbeddingBody": (embedding_create_params.EmbeddingCreateParams,),
    "DecisionsBody": (decision_create_params.DecisionCreateParams,),
}


def openai_fields() -> dict[str, Fields]:
    """Return the fields of openai's typed dicts of parameters, and `stream`, which only the streaming ones have."""
    fields = {body: frozenset().union(*map(get_type_hints, kinds)) for body, kinds in _OPENAI.items()}
    return {
        body: names | {"stream"} if body in ("CompletionBody", "ChatBody") else names for body, names in fields.items()
    }


def _parameters(method: Callable[..., Any], *others: str) -> Fields:
    """Return the parameters of a client's method that it sends in the body."""
    return frozenset(inspect.signature(method).parameters) - {"self", "request_options", "extra_body", *others}


def cohere_fields() -> dict[str, Fields]:
    """Return the parameters of cohere's methods. Its /v2/embed is not served, but its fields are sent to embeddings."""
    embed = _parameters(cohere.ClientV2.embed) | _parameters(cohere.Client.embed, "batching")
    return {
        "RerankBody": _parameters(cohere.ClientV2.rerank) | _parameters(cohere.Client.rerank),
        "EmbeddingBody": embed,
        "ClassifyBody": _parameters(cohere.Client.classify),
    }


def hugging_face_fields() -> dict[str, Fields]:
    """Return the fields that huggingface_hub's client sends if all parameters of its methods are set."""
    return {
        "ChatBody": frozenset(_sent(InferenceClient.chat_completion, [{"role": "user", "content": "a"}])),
        "PlainBody": frozenset(_sent(InferenceClient.feature_extraction, "a")),
        "PredictBody": frozenset(_sent(InferenceClient.text_classification, "a")),
    }


def hugging_face_parameters() -> Fields:
    """Return the fields of `parameters` in the requests of huggingface_hub's client for classes."""
    return frozenset(_sent(InferenceClient.text_classification, "a")["parameters"])


def _sent(method: Callable[..., Any], argument: Any) -> dict[str, Any]:
    """Return the body that a method sends. Its parameter `model` is the URL of the server."""
    names = [*inspect.signature(method).parameters][2:]
    values = {name: 1 for name in names if name not in ("model", "stream", "extra_body")}
    bodies: list[Any] = []

    def post(_: Any, request: Any, **__: Any) -> Any:
        bodies.append(request.json)
        raise ConnectionAbortedError

    with mock.patch.object(InferenceClient, "_inner_post", post), contextlib.suppress(ConnectionAbortedError):
        method(InferenceClient("http://here"), argument, **values)
    body: dict[str, Any] = bodies[0]
    return body


def _words(text: str) -> Fields:
    return frozenset(text.split())


# text-embeddings-inference, router/src/http/types.rs at 0d124dc.
TEI = {
    "PlainBody": _words("inputs truncate truncation_direction prompt_name normalize dimensions"),
    "PredictBody": _words("inputs truncate truncation_direction raw_scores"),
    "RerankBody": _words("query texts truncate truncation_direction raw_scores return_text"),
    "EmbeddingBody": _words("input model user encoding_format dimensions"),
    "TokenizeBody": _words("inputs add_special_tokens prompt_name"),
    "DetokenizeBody": _words("ids skip_special_tokens"),
}

# api.jina.ai/redoc: the requests of /v1/embeddings and /v1/rerank; jina-reranker-v3's modeling.py for its two limits;
# `encoding_type` in the client of LlamaIndex, `prompt_name` in servers of the same format.
JINA = {
    "EmbeddingBody": _words(
        "model input embedding_type encoding_type task dimensions normalized late_chunking truncate prompt_name"
    ),
    "RerankBody": _words(
        "model query documents top_n return_documents return_embeddings truncation instruction max_doc_length "
        "max_query_length"
    ),
}

# vLLM, vllm/entrypoints/pooling/base/protocol.py at 020638a; `softmax`, `activation` and `normalize` in older versions.
_VLLM_BASIC = _words(
    "model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs cache_salt"
)
_VLLM_TEXTS = _words("input add_special_tokens")
_VLLM_CHAT = _words(
    "messages add_generation_prompt continue_final_message add_special_tokens chat_template chat_template_kwargs "
    "media_io_kwargs"
)
_VLLM_POOLED = _VLLM_BASIC | _VLLM_TEXTS | _VLLM_CHAT
_VLLM_VECTORS = _words("encoding_format embed_dtype endianness dimensions use_activation normalize")
_VLLM_CLASSES = _words("use_activation softmax activation")
# vLLM, vllm/entrypoints/pooling/scoring/protocol.py at 004706d, and the limits that its main branch has since.
_VLLM_PAIRS = (
    _VLLM_BASIC
    | _VLLM_CLASSES
    | _words("chat_template chat_template_kwargs max_tokens_per_query max_tokens_per_doc instruction")
)
# vLLM, vllm/entrypoints/openai/completion/protocol.py and chat_completion/protocol.py at 002032e.
_VLLM_SAMPLING = _words(
    "model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options "
    "temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids "
    "include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens "
    "truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words echo "
    "add_special_tokens response_format structured_outputs priority request_id session_id return_tokens_as_token_ids "
    "return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params "
    "ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval "
    # Versions before 0.12.
    "guided_choice guided_regex guided_json guided_grammar logits_processors"
)
VLLM = {
    "CompletionBody": _VLLM_SAMPLING | _words("prompt suffix prompt_embeds best_of"),
    "ChatBody": _VLLM_SAMPLING
    | _words(
        "messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning "
        "parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs "
        "media_io_kwargs mm_processor_kwargs return_prompt_text"
    ),
    # vllm/entrypoints/chat_utils.py, CustomChatCompletionMessageParam.
    "ChatMessage": _words("role content name tool_call_id tool_calls reasoning reasoning_content tools"),
    "EmbeddingBody": _VLLM_POOLED | _VLLM_VECTORS,
    "PoolingBody": _VLLM_POOLED | _VLLM_VECTORS | _VLLM_CLASSES | _words("task data"),
    "ClassifyBody": _VLLM_POOLED | _VLLM_CLASSES,
    "RerankBody": _VLLM_PAIRS | _words("query documents top_n"),
    "PairScoreBody": _VLLM_PAIRS | _words("queries documents items text_1 text_2 data_1 data_2"),
    # vllm/entrypoints/openai/generative_scores/protocol.py at 8288f48.
    "GenerativeBody": _words(
        "model query items label_token_ids apply_softmax item_first temperature top_k top_p add_special_tokens "
        "priority request_id"
    ),
    # vllm/entrypoints/openai/decisions/protocol.py at 09e6fa5.
    "DecisionsBody": _words("model input questions safety_identifier"),
    # vllm/entrypoints/serve/tokenize/protocol.py at 030ea52.
    "TokenizeBody": _words(
        "model prompt add_special_tokens return_token_strs messages add_generation_prompt continue_final_message "
        "chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools"
    ),
    "DetokenizeBody": _words("model tokens"),
}

# SGLang, python/sglang/srt/entrypoints/openai/protocol.py at 004c82e.
_SGLANG_SAMPLING = _words(
    "model echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options "
    "temperature top_p user return_hidden_states return_routed_experts routed_experts_start_len "
    "return_cached_tokens_details return_token_ids top_k min_p min_tokens json_schema regex ebnf repetition_penalty "
    "stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params "
    "response_format custom_params custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room "
    "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id priority "
    "custom_labels"
)
SGLANG = {
    "CompletionBody": _SGLANG_SAMPLING | _words("prompt best_of suffix"),
    "ChatBody": _SGLANG_SAMPLING
    | _words(
        "messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls return_prompt_token_ids "
        "return_meta_info reasoning_effort reasoning task continue_final_message separate_reasoning stream_reasoning "
        "chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids"
    ),
    "EmbeddingBody": _words(
        "input model encoding_format dimensions user rid priority lora_path embed_override_token_id embed_overrides"
    ),
    "ClassifyBody": _words("model input user rid priority"),
    "LabelScoreBody": _words(
        "query items embed_override_token_id query_embed_overrides item_embed_overrides label_token_ids apply_softmax "
        "item_first return_pooled_hidden_states model"
    ),
    "RerankBody": _words("query documents instruct top_n return_documents"),
    "LabelledBody": _words("model input questions temperature prompt_format_version images return_prompt_token_ids"),
    "TokenizeBody": _words(
        "model prompt messages tools tool_choice reasoning_effort continue_final_message chat_template_kwargs "
        "add_special_tokens"
    ),
    "DetokenizeBody": _words("model tokens skip_special_tokens"),
}

# transformers, src/transformers/cli/serve.py, and the System One API.
TRANSFORMERS = {"SystemoneBody": _words("model state questions assets")}

"""Fields of other servers' requests that moepass does not use: which values change nothing, and which are refused.

Every field that the clients of OpenAI, Cohere, Hugging Face, text-embeddings-inference (TEI), Jina, vLLM and SGLang can
send to a route of moepass is either a field of the route's body or has a rule here. Fields that none of them defines
have no rule and are ignored. `tests/helpers/serving/client_fields.py` lists the fields by client, with their sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from moepass.models.errors import InputError
from moepass.runtime.serving.questions.wordings import SGLANG_VERSION


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRule:
    """The `values` of a field that change nothing here; None if all values change nothing. Null never does.

    `reason` says why other values are refused.
    """

    values: tuple[Any, ...] | None
    reason: str = ""

    def accepts(self, value: Any) -> bool:
        """Return True if `value` changes nothing."""
        if self.values is None or value is None:
            return True
        # In Python, True == 1 and False == 0, but clients mean different things by them.
        return any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in self.values)


Rules = Mapping[str, ValueRule]


def check_fields(body: Mapping[str, Any], kind: str, used: Collection[str], path: str = "") -> None:
    """Raise InputError if `body`, of type `kind` with the fields `used`, has a field whose value is refused.

    `path` precedes the names of fields in errors.
    """
    rules = rules_of(kind)
    for name, value in body.items():
        rule = rules.get(name)
        if rule is None or name in used or rule.accepts(value):
            continue
        values = [msgspec.json.encode(accepted).decode() for accepted in rule.values or ()]
        advice = f"send {' or '.join(values)}, or remove it" if values else "remove it"
        shown = msgspec.json.encode(value).decode()
        problem = f"{path}{name} is {shown if len(shown) <= 60 else shown[:60] + '…'}, but {rule.reason}; {advice}"
        raise InputError(problem, name=path + name, value=value, expected=rule.values)


def rules_of(kind: str) -> Rules:
    """Return the rules for bodies of type `kind`."""
    return {**EVERY_BODY, **BODIES[kind]}


def _ignored(*names: str) -> dict[str, ValueRule]:
    return dict.fromkeys(names, ValueRule(None))


def _refused(reason: str, *names: str, **values: tuple[Any, ...]) -> dict[str, ValueRule]:
    """Return rules that refuse the fields `names`, and those in `values` unless they have one of these values."""
    return {name: ValueRule((), reason) for name in names} | {
        name: ValueRule(accepted, reason) for name, accepted in values.items()
    }


_OWN_TEMPLATE = "prompts are rendered by the checkpoint's own template"
_OWN_PROBABILITIES = "the model's probabilities are returned unchanged"
_NO_SUCH_OUTPUT = "this server does not return it"
_TEXT_ONLY = "this server takes texts only"
_NO_ADAPTERS = "this server has no adapters"
_NO_CONVERSATIONS = "this route takes no conversations"
_NO_TRUNCATION = "this route does not truncate"

# Names of clients and requests, and hints for the billing, storage, caches and processes of other servers.
_HINTS = _ignored(
    *("user", "request_id", "rid", "session_id", "safety_identifier", "metadata", "custom_labels", "service_tier"),
    *("store", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "ngram_corpus_id"),
)
# Options for images and sounds, which text does not have.
_MEDIA = _ignored(
    *("mm_processor_kwargs", "media_io_kwargs", "images_config", "max_dynamic_patch", "min_dynamic_patch"),
    "use_audio_in_video",
)

EVERY_BODY: Rules = {
    **_HINTS,
    **_MEDIA,
    **_refused(
        _OWN_TEMPLATE,
        "chat_template",
        chat_template_kwargs=({}, {"enable_thinking": False}),
        add_generation_prompt=(True,),
        continue_final_message=(False,),
    ),
    **_refused(_NO_TRUNCATION, truncate_prompt_tokens=(-1,)),
    **_refused(
        _OWN_PROBABILITIES,
        *("guided_regex", "guided_json", "guided_grammar"),
        guided_choice=([],),
        structured_outputs=({},),
        allowed_token_ids=([],),
        bad_words=([],),
        logits_processors=([],),
    ),
    **_refused(_NO_SUCH_OUTPUT, "prompt_logprobs"),
}

_ADAPTERS = _refused(_NO_ADAPTERS, lora_path=([],))
_OVERRIDES = _refused(
    "this server computes all embeddings of tokens itself",
    *("embed_override_token_id", "embed_overrides", "query_embed_overrides", "item_embed_overrides"),
)

_SAMPLING = {
    **_ADAPTERS,
    # The most likely token is the same for all values. A single token cannot repeat itself, and is streamed as a whole.
    **_ignored("top_p", "top_k", "min_p", "seed", "length_penalty", "repetition_detection", "stream_interval"),
    # Parts of the reply that these fields turn on or off, or format, do not exist here.
    **_ignored("spaces_between_special_tokens", "return_token_offsets", "return_mm_kwargs"),
    **_ignored("routed_experts_prompt_start", "routed_experts_start_len"),
    **_refused("only the most likely token is returned", n=(1,), temperature=(0,), use_beam_search=(False,)),
    **_refused(
        _OWN_PROBABILITIES,
        *("regex", "ebnf", "json_schema", "custom_logit_processor"),
        presence_penalty=(0,),
        frequency_penalty=(0,),
        repetition_penalty=(1,),
        logit_bias=({},),
        response_format=({"type": "text"},),
        min_tokens=(0,),
        thinking_token_budget=(-1,),
        watermarking=(False,),
        vllm_xargs=({},),
        custom_params=({},),
    ),
    **_refused(
        "only the texts in stop end the answer",
        stop_token_ids=([],),
        stop_regex=([],),
        include_stop_str_in_output=(False,),
        no_stop_trim=(False,),
    ),
    **_refused(
        _NO_SUCH_OUTPUT,
        "logprob_token_ids",
        return_hidden_states=(False,),
        return_routed_experts=(False,),
        return_token_ids=(False,),
        return_prompt_token_ids=(False,),
        return_prompt_text=(False,),
        return_cached_tokens_details=(False,),
        return_meta_info=(False,),
    ),
    **_refused("this server keeps no sessions", session_params=({},)),
    **_refused("this server separates caches by cache_salt", "extra_key"),
}

# Fields of embeddings, classes and scores.
_POOLED = {
    **_ADAPTERS,
    **_OVERRIDES,
    **_ignored("add_generation_prompt"),  # without a conversation there is no turn to open
    **_refused("prompts are computed without padding", padding=("do_not_pad",)),
    **_refused(_NO_CONVERSATIONS, "messages"),
    **_refused("this server calls this field use_activation", softmax=(True,), activation=(True,)),
}
_VECTORS = {
    **_POOLED,
    **_refused(
        "vectors are returned as little-endian float32",
        embed_dtype=("float32",),
        endianness=("native", "little"),
        embedding_types=(["float"],),
        embedding_type=("float", ["float"]),
        encoding_type=("float",),
    ),
    **_refused("each text is embedded separately", late_chunking=(False,)),
    **_refused("this server calls this limit truncate_prompt_tokens", "max_tokens"),
    **_refused("this server calls this field dimensions", "output_dimension"),
    **_refused("this server calls this field prompt_name", "instruction", "instruct"),
    **_refused(_TEXT_ONLY, images=([],)),
}
_PAIRS = {
    **_POOLED,
    **_refused("pairs are encoded with special tokens", add_special_tokens=(True,)),
    **_refused("documents are read as a whole", "max_chunks_per_doc"),
    **_refused("this server calls this limit max_tokens_per_doc", "max_doc_length"),
    **_refused("this server calls this limit max_tokens_per_query", "max_query_length"),
}
_LABEL_SCORES = {
    **_POOLED,
    **_refused(_NO_SUCH_OUTPUT, return_pooled_hidden_states=(False,)),
    **_refused(
        _NO_TRUNCATION,
        *("max_tokens_per_doc", "max_tokens_per_query"),
        truncation_side=("left", "right"),
        truncate=(False, "NONE"),
    ),
    **_refused("label_token_ids asks for probabilities of tokens", use_activation=(True,), raw_scores=(False,)),
    **_refused("query and items are the whole prompt", "instruction", "instruct"),
    **_refused("label_token_ids needs query and items", "queries", "documents", "text_1", "text_2"),
}

BODIES: Mapping[str, Rules] = {
    "CompletionBody": {
        **_SAMPLING,
        **_refused("only the most likely token is returned", best_of=(1,)),
        **_refused("this server does not insert text", suffix=("",)),
        **_refused("prompts are texts or token ids", "prompt_embeds"),
    },
    "ChatBody": {
        **_SAMPLING,
        # Without tools and reasoning, these change nothing.
        **_ignored("parallel_tool_calls", "include_reasoning", "separate_reasoning", "stream_reasoning"),
        **_ignored("prediction"),  # only makes other servers faster
        **_refused(
            "the answer is a single token, and prompts contain no tools",
            *("audio", "web_search_options"),
            tools=([],),
            functions=([],),
            tool_choice=("none", "auto"),
            function_call=("none", "auto"),
            tool_prompt=("",),
            modalities=(["text"],),
        ),
        **_refused("prompts are rendered without reasoning", reasoning_effort=("none",), reasoning=({},)),
        **_refused(
            _OWN_TEMPLATE, "task", "input_ids", documents=([],), add_special_tokens=(False,), verbosity=("medium",)
        ),
        **_refused("only the answer is returned", "moderation", echo=(False,)),
    },
    "ChatMessage": {
        **_refused(
            "conversations contain only roles, names and texts",
            *("function_call", "tool_call_id", "audio", "refusal", "reasoning", "reasoning_content"),
            tool_calls=([],),
            tools=([],),
        ),
    },
    "DecisionsBody": {},
    "LabelledBody": {
        **_refused(_TEXT_ONLY, images=([],)),
        **_refused(_OWN_PROBABILITIES, temperature=(1,)),
        **_refused(_NO_SUCH_OUTPUT, return_prompt_token_ids=(False,)),
        **_refused("this server has one version of the prompt", prompt_format_version=(SGLANG_VERSION,)),
    },
    "SystemoneBody": _refused(_TEXT_ONLY, assets=({},)),
    "LabelScoreBody": _LABEL_SCORES,
    "GenerativeBody": {
        **_LABEL_SCORES,
        **_refused(_OWN_PROBABILITIES, temperature=(0, 1), top_p=(1,), top_k=(0, -1)),
    },
    "PairScoreBody": {
        **_PAIRS,
        **_refused("pairs are queries and documents", "data_1", "data_2", "items", "query", item_first=(False,)),
        **_refused("label_token_ids is missing", apply_softmax=(False,), return_pooled_hidden_states=(False,)),
    },
    "RerankBody": {
        **_PAIRS,
        **_refused(_NO_SUCH_OUTPUT, relevant_spans=({}, []), return_embeddings=(False,)),
        **_refused("documents are read by their text alone", rank_fields=(["text"],)),
        **_refused("this server calls this field truncate", truncation=(False,)),
        **_refused("this server calls this field top_n", "top_k"),
    },
    "EmbeddingBody": {**_VECTORS, **_refused("texts are sent as input", "texts", "inputs")},
    "PlainBody": {
        **_VECTORS,
        **_refused("vectors are returned as lists of numbers", encoding_format=("float",)),
        **_refused("a text is embedded, not continued", parameters=({},), stream=(False,)),
    },
    "ClassifyBody": {
        **_POOLED,
        **_refused("classes are returned as numbers", "dimensions", encoding_format=("float",), task=("classify",)),
        **_refused("this model's own classes are returned", "preset", examples=([],)),
        **_refused("texts are sent as input", "inputs"),
    },
    "PoolingBody": {**_VECTORS, **_refused("texts are sent as input", "data")},
    "PredictBody": {
        **_POOLED,
        **_refused("texts are encoded with special tokens", add_special_tokens=(True,)),
        **_refused("texts are classified without a prompt", "prompt_name"),
        **_refused("this server calls this field raw_scores", use_activation=(True,)),
    },
    "TokenizeBody": {
        **_refused("prompts contain no tools", tools=([],), tool_choice=("none", "auto")),
        **_refused("prompts are rendered without reasoning", reasoning_effort=("none",)),
        **_refused("a text is sent as prompt", "inputs", "prompt_name"),
    },
    "DetokenizeBody": _refused("token ids are sent as tokens", "ids"),
}

"""Conversion between texts and tokens: /tokenize, /detokenize and /tokenizer_info, in vLLM's format."""

from __future__ import annotations

from typing import Any

import msgspec

from moepass.models.errors import InputError
from moepass.models.limits import MOST_REQUEST_TOKENS, check_limit
from moepass.runtime.serving.requests.request import Tokens
from moepass.runtime.serving.routes.chat import ChatMessage, encode_messages
from moepass.runtime.serving.routes.prompt_inputs import check_token_ids
from moepass.runtime.serving.routes.service import Call, Route


class TokenizeBody(msgspec.Struct):
    """A text, or messages. Control tokens in a text are encoded as text, as they are in prompts."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str = ""
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class TokenizeReply(msgspec.Struct):
    """The reply of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct):
    """The body of /detokenize."""

    tokens: list[int]
    model: str = ""
    skip_special_tokens: bool = False


class DetokenizeReply(msgspec.Struct):
    """The reply of /detokenize."""

    prompt: str


class TokenizerReply(msgspec.Struct):
    """The tokenizer. `control_tokens` maps the ids of tokens that a user's text never becomes to their names."""

    tokenizer_class: str
    model_max_length: int
    vocabulary_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    control_tokens: dict[int, str]


async def tokenize(call: Call) -> TokenizeReply:
    """Return the tokens of a text or of rendered messages."""
    body = call.body(TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise InputError("the body must have either prompt or messages, and not both", name="prompt")
    tokens = (await call.prepare(_tokens, call, body)).tolist()
    names = call.writer.encoder.names(tokens) if body.return_token_strs else None
    return TokenizeReply(len(tokens), call.writer.most_tokens, tokens, names)


def _tokens(call: Call, body: TokenizeBody) -> Tokens:
    if body.prompt is not None:
        add_special = body.add_special_tokens is not False
        return call.writer.encode_plain([body.prompt], add_special=add_special, name="prompt")[0]
    if body.add_special_tokens:
        text = "add_special_tokens is true, but the chat template adds the special tokens of messages; remove it"
        raise InputError(text, name="add_special_tokens", value=True, expected=False)
    return encode_messages(call, body.messages or [], add_generation_prompt=body.add_generation_prompt)


async def detokenize(call: Call) -> DetokenizeReply:
    """Return the text of tokens."""
    body = call.body(DetokenizeBody)
    advice = "send them in several requests"
    check_limit("the number of tokens", len(body.tokens), MOST_REQUEST_TOKENS, advice, name="tokens")
    check_token_ids(call, body.tokens, "tokens")
    texts = call.writer.token_texts
    return DetokenizeReply(await call.prepare(texts.text, body.tokens, skip_special=body.skip_special_tokens))


async def tokenizer_info(call: Call) -> TokenizerReply:
    """Return the properties of the tokenizer."""
    tokenizer: Any = call.writer.tokenizer
    return TokenizerReply(
        type(tokenizer).__name__,
        call.writer.most_tokens,
        call.service.backend.status().vocabulary_size,
        tokenizer.bos_token,
        tokenizer.eos_token,
        tokenizer.pad_token,
        tokenizer.unk_token,
        tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
        call.writer.encoder.control_tokens,
    )


ROUTES = (
    Route("POST", "/tokenize", tokenize, (TokenizeBody,), (TokenizeReply,), asks_model=False),
    Route("POST", "/detokenize", detokenize, (DetokenizeBody,), (DetokenizeReply,), asks_model=False),
    Route("GET", "/tokenizer_info", tokenizer_info, (), (TokenizerReply,)),
)

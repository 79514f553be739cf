"""POST /v1/chat/completions for one token behind a conversation, with its log-probability and the likeliest others."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from fastapi.responses import Response

from moepass.models.errors import InputError
from moepass.runtime.serving.questions.request_tree import RequestTree
from moepass.runtime.serving.questions.token_texts import TokenTexts
from moepass.runtime.serving.routes.completions import (
    CompletionUsage,
    StreamOptions,
    TopCount,
    at_least,
    check_decoding,
    check_sampling,
    event_stream,
    usage_of,
)
from moepass.runtime.serving.routes.message_text import Content, content_text
from moepass.runtime.serving.routes.service import Call, Priority, Route, Salt, json_response, new_id


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ChatBody(msgspec.Struct):
    messages: list[ChatMessage]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: TopCount | None = None
    temperature: float | None = None
    n: int | None = 1
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Priority = 0
    cache_salt: Salt = None


class ListedToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class SaidToken(ListedToken):
    top_logprobs: list[ListedToken]


class ChatLogprobs(msgspec.Struct):
    content: list[SaidToken]
    refusal: None = None


class ChatReplyMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    index: int = 0


class ChatReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    object: Literal["chat.completion"] = "chat.completion"


class ChunkChoice(msgspec.Struct):
    delta: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    index: int = 0


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: CompletionUsage | None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


async def chat(call: Call) -> Response:
    body = call.body(ChatBody)
    asked = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
    check_decoding(body.max_completion_tokens if body.max_tokens is None else body.max_tokens, asked, least=1)
    check_sampling(body.n, body.temperature, body.presence_penalty, body.frequency_penalty, body.logit_bias)
    for name, value in (("tools", body.tools), ("response_format", body.response_format)):
        if value and value != {"type": "text"}:
            raise InputError(f"{name} is given; one token calls no tool and has no format, leave it out", name=name)
    if not body.messages:
        raise InputError("messages is empty; give one or more", name="messages", expected="1 or more")
    call.need_predictions()
    prompt = await call.prepare(_prompt, call, body)
    tree = RequestTree(call.writer.most_tokens)
    number = tree.add(prompt, "messages")
    count = body.top_logprobs or 0
    tree.read(number, len(prompt) - 1, top=max(1, count))
    answer = await call.answer_tree(tree, body.cache_salt, body.priority)
    best = answer.top(number, len(prompt) - 1, max(1, count))
    texts = TokenTexts(call.writer.tokenizer)
    listed = [ListedToken(texts.name(token), at_least(value), texts.utf8(token)) for token, value in best]
    said = listed[0]
    found = ChatLogprobs([SaidToken(said.token, said.logprob, said.bytes, listed[:count])]) if body.logprobs else None
    is_end = best[0][0] in texts.end_tokens
    finish: Literal["stop", "length"] = "stop" if is_end else "length"
    message = ChatReplyMessage("" if is_end else texts.text([best[0][0]]))
    usage = usage_of(call, [len(prompt)], 1)
    identity = (new_id("chatcmpl"), int(time.time()), call.model)
    if not body.stream:
        return json_response(ChatReply(*identity, [ChatChoice(message, found, finish)], usage))
    chunks = [ChatChunk(*identity, [ChunkChoice(message, found, finish)])]
    if (body.stream_options or StreamOptions()).include_usage:
        chunks.append(ChatChunk(*identity, [], usage))
    return event_stream(chunks)


def _prompt(call: Call, body: ChatBody) -> Any:
    messages = [
        {
            # Templates know no developer; OpenAI's own clients send it where others send system.
            "role": "system" if message.role == "developer" else message.role,
            "content": content_text(message.content, f"messages[{number}].content"),
        }
        for number, message in enumerate(body.messages)
    ]
    (tokens,) = call.writer.encode([call.writer.chat(messages)])
    return tokens


ROUTES = (Route("POST", "/v1/chat/completions", chat, (ChatBody,), (ChatReply,), has_streams=True),)

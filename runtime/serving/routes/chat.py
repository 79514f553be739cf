"""POST /v1/chat/completions: the most likely next token of a conversation, with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi.responses import Response

from moepass.models.errors import InputError
from moepass.runtime.serving.questions.request_tree import RequestTree
from moepass.runtime.serving.requests.request import Tokens
from moepass.runtime.serving.routes import completions
from moepass.runtime.serving.routes.body_fields import check_fields
from moepass.runtime.serving.routes.message_text import Content, content_text
from moepass.runtime.serving.routes.service import Call, CreatedReply, Route, json_response
from moepass.runtime.serving.routes.truncation import text_cut


class ChatMessage(msgspec.Struct):
    """An entry of `messages` in a chat request."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None


class ChatBody(completions.SamplingBody):
    """OpenAI's body of /v1/chat/completions. Only one token can be requested."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: completions.TopCount | None = None


class ListedToken(msgspec.Struct):
    """A token with its log-probability; `bytes` is null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class SaidToken(ListedToken):
    """The answered token, with the most likely tokens."""

    top_logprobs: list[ListedToken]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of the answer."""

    content: list[SaidToken]
    refusal: None = None


class ChatReplyMessage(msgspec.Struct):
    """The `message` of a choice."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """The single entry of `choices` in a chat completion."""

    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: completions.FinishReason
    index: int = 0


class ChatReply(CreatedReply):
    """The reply of /v1/chat/completions."""

    choices: list[ChatChoice]
    usage: completions.CompletionUsage
    object: Literal["chat.completion"] = "chat.completion"


class ChunkChoice(msgspec.Struct):
    """The single entry of `choices` in a chunk of a stream."""

    delta: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: completions.FinishReason
    index: int = 0


class ChatChunk(CreatedReply):
    """A server-sent event of a streamed chat completion."""

    choices: list[ChunkChoice]
    usage: completions.CompletionUsage | None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


async def chat(call: Call) -> Response:
    """Answer a conversation with its most likely next token."""
    body = call.body(ChatBody)
    limit = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
    completions.check_decoding(getattr(body, limit), limit, least=1)
    if not body.messages:
        raise InputError("messages is empty; send one or more", name="messages", expected="1 or more")
    call.need_predictions()
    prompt = await call.prepare(encode_messages, call, body.messages)
    if (cut := text_cut(call, body, "left")) is not None:
        prompt = cut.kept(prompt)
    tree = RequestTree(call.writer.most_tokens)
    number = tree.add(prompt, "messages")
    count = body.top_logprobs or 0
    tree.read(number, len(prompt) - 1, top=max(1, count))
    answer = await call.answer_tree(tree)
    best = answer.top(number, len(prompt) - 1, max(1, count))
    texts = call.writer.token_texts
    name = texts.name_as_id if body.return_tokens_as_token_ids else texts.name
    listed = [
        ListedToken(name(token), completions.json_log_probability(value), list(texts.utf8(token) or b"") or None)
        for token, value in best
    ]
    answered = listed[0]
    logprobs = None
    if body.logprobs:
        logprobs = ChatLogprobs([SaidToken(answered.token, answered.logprob, answered.bytes, listed[:count])])
    text, finish = completions.said_text(texts, best[0][0], body)
    message = ChatReplyMessage(text)
    usage = completions.usage_of(call, [len(prompt)], 1)
    identity = call.reply_fields("chatcmpl")
    if not body.stream:
        return json_response(ChatReply(*identity, [ChatChoice(message, logprobs, finish)], usage))
    chunks = [ChatChunk(*identity, [ChunkChoice(message, logprobs, finish)])]
    if body.stream_options is not None and body.stream_options.include_usage:
        chunks.append(ChatChunk(*identity, [], usage))
    return completions.event_stream(chunks)


def encode_messages(call: Call, messages: Sequence[ChatMessage], **options: Any) -> Tokens:
    """Return the tokens of a conversation, rendered by the chat template with these options."""
    for number, message in enumerate(call.json()["messages"]):
        check_fields(message, "ChatMessage", ChatMessage.__struct_fields__, f"messages[{number}].")
    template_messages = [
        {
            # OpenAI's clients send "developer" instead of "system", which templates do not support.
            "role": "system" if message.role == "developer" else message.role,
            "content": content_text(message.content, f"messages[{number}].content"),
        }
        | ({} if message.name is None else {"name": message.name})
        for number, message in enumerate(messages)
    ]
    return call.writer.encode([call.writer.chat(template_messages, **options)])[0]


ROUTES = (Route("POST", "/v1/chat/completions", chat, (ChatBody,), (ChatReply,), has_streams=True),)

"""POST /v1/completions: log-probabilities of the prompt, and the most likely next token (temperature 0).

The default of `max_tokens` is 16, as in OpenAI's API, and is refused, because this server does not decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from fastapi.responses import Response
from msgspec import Meta

from moepass.models.errors import CheckpointError, InputError
from moepass.models.limits import MOST_TOP_TOKENS
from moepass.runtime.serving.questions.request_tree import LEAST_LOG_PROBABILITY, NO_NUMBERS, RequestTree, TreeAnswer
from moepass.runtime.serving.questions.token_texts import TokenTexts
from moepass.runtime.serving.requests.request import Tokens
from moepass.runtime.serving.routes.errors import DecodingError
from moepass.runtime.serving.routes.prompt_inputs import Inputs, check_answer_size, encode_prompts, parse_prompts
from moepass.runtime.serving.routes.service import Call, CreatedReply, Route, json_response
from moepass.runtime.serving.routes.truncation import TruncatedBody, text_cut

# A token, its log-probability, and the most likely tokens at its position; None for the first token of a prompt.
_ListedToken = tuple[int, float | None, list[tuple[int, float]] | None]
FinishReason = Literal["stop", "length"]
TopCount = Annotated[int, Meta(ge=0, le=MOST_TOP_TOKENS)]


class StreamOptions(msgspec.Struct):
    """Options of a streamed reply."""

    include_usage: bool = False


class SamplingBody(TruncatedBody, kw_only=True):
    """Fields of both OpenAI bodies. With `ignore_eos`, a token that ends the output has no effect on the reply."""

    stop: str | list[str] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None


class CompletionBody(SamplingBody):
    """OpenAI's body of /v1/completions. At most one token can be requested."""

    prompt: Inputs
    max_tokens: int | None = 16
    echo: bool | None = False
    logprobs: TopCount | None = None
    add_special_tokens: bool = True


class CompletionLogprobs(msgspec.Struct):
    """The listed tokens, their log-probabilities, and the most likely tokens at each position."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """The completion of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CachedDetails(msgspec.Struct):
    """Prompt tokens that came from the cache."""

    cached_tokens: int


class CompletionUsage(msgspec.Struct):
    """Tokens as OpenAI counts them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails


class CompletionReply(CreatedReply):
    """The reply of /v1/completions, and a chunk of a streamed reply."""

    choices: list[CompletionChoice]
    usage: CompletionUsage | None
    object: Literal["text_completion"] = "text_completion"


async def complete(call: Call) -> Response:
    """Score prompts and return the most likely next token of each."""
    body = call.body(CompletionBody)
    check_decoding(body.max_tokens, "max_tokens", least=0)
    call.need_predictions()
    texts = call.writer.token_texts
    prompts, prompt_texts = await call.prepare(_prompts, call, body)
    listed_tokens = sum(map(len, prompts)) if body.echo else len(prompts)
    check_answer_size(0 if body.logprobs is None else listed_tokens * (1 + body.logprobs))
    trees = []
    for index, prompt in enumerate(prompts):
        tree = RequestTree(call.writer.most_tokens)
        number = tree.add(prompt, f"prompt[{index}]" if len(prompts) > 1 else "prompt")
        if body.max_tokens == 1 or not body.echo or body.logprobs is None:
            tree.read(number, len(prompt) - 1, top=max(1, body.logprobs or 0))
        if body.echo and body.logprobs is not None:
            tree.score(number, body.logprobs)
        trees.append(tree)
    answers = await call.answer_trees(trees)
    choices = [
        _choice(index, prompt, text, body, answer, texts)
        for index, (prompt, text, answer) in enumerate(zip(prompts, prompt_texts, answers, strict=True))
    ]
    usage = usage_of(call, [len(prompt) for prompt in prompts], body.max_tokens or 0)
    reply = CompletionReply(*call.reply_fields("cmpl"), choices, usage)
    if not body.stream:
        return json_response(reply)
    chunks = [msgspec.structs.replace(reply, choices=[choice], usage=None) for choice in choices]
    if body.stream_options is not None and body.stream_options.include_usage:
        chunks.append(msgspec.structs.replace(reply, choices=[]))
    return event_stream(chunks)


def _prompts(call: Call, body: CompletionBody) -> tuple[list[Tokens], list[str]]:
    """Return the tokens of all prompts, and their texts, which are empty unless the reply contains them."""
    prompts = parse_prompts(call, body.prompt, "prompt")
    # Like vLLM, keep the end of a prompt that the token is predicted from.
    cut = text_cut(call, body, "left")
    encoded = encode_prompts(call, prompts, "prompt", add_special=body.add_special_tokens, cut=cut)
    if not body.echo:
        return encoded, [""] * len(encoded)
    texts = call.writer.token_texts
    return encoded, [
        prompt if isinstance(prompt, str) and cut is None else texts.text(tokens.tolist())
        for prompt, tokens in zip(prompts, encoded, strict=True)
    ]


def _choice(
    index: int, prompt: Tokens, text: str, body: CompletionBody, answer: TreeAnswer, texts: TokenTexts
) -> CompletionChoice:
    offsets: list[int] = []
    listed: list[_ListedToken] = []
    if body.echo and body.logprobs is not None:
        scored = answer.scored(0)
        offsets = texts.offsets(prompt.tolist(), text)
        for position, token in enumerate(prompt.tolist()):
            if position == 0:
                listed.append((token, None, None))
                continue
            top_tokens, top_values = scored.top_tokens[position], scored.top_log_probabilities[position]
            pairs = zip(top_tokens.tolist(), top_values.tolist(), strict=True)
            listed.append((token, float(scored.log_probabilities[position]), list(pairs)))
    finish: FinishReason = "length"
    if body.max_tokens == 1:
        best = answer.top(0, len(prompt) - 1, max(1, body.logprobs or 0))
        token, value = best[0]
        token_text, finish = said_text(texts, token, body, continues=True)
        offsets.append(len(text))
        text += token_text
        listed.append((token, value, best[: body.logprobs]))
    name = texts.name_as_id if body.return_tokens_as_token_ids else texts.name
    logprobs = None if body.logprobs is None else _logprobs(listed, offsets, name)
    return CompletionChoice(index, text, logprobs, finish)


def _logprobs(listed: Sequence[_ListedToken], offsets: list[int], name_of: Callable[[int], str]) -> CompletionLogprobs:
    logprobs = CompletionLogprobs([], [], [], offsets)
    for token, value, best in listed:
        name = name_of(token)
        logprobs.tokens.append(name)
        logprobs.token_logprobs.append(None if value is None else json_log_probability(value))
        if best is None or value is None:
            logprobs.top_logprobs.append(None)
            continue
        # The token itself is always listed. Another token with the same text must not replace it.
        by_name = {name: json_log_probability(value)}
        for top_token, top_value in best:
            if top_token != token:
                top_name = name_of(top_token)
                key = TokenTexts.name_as_id(top_token) if top_name in by_name else top_name
                by_name[key] = json_log_probability(top_value)
        logprobs.top_logprobs.append(by_name)
    return logprobs


def json_log_probability(log_probability: float) -> float:
    """Return a log-probability as JSON has it, at least LEAST_LOG_PROBABILITY. Raise CheckpointError for NaN."""
    if math.isnan(log_probability):
        raise CheckpointError(NO_NUMBERS, name="output")
    return max(log_probability, LEAST_LOG_PROBABILITY)


def check_decoding(count: int | None, name: str, *, least: int) -> None:
    """Raise DecodingError if more than one token is requested, and InputError for fewer than `least`."""
    if count is None or count > 1:
        text = (
            f"{name} is {'missing' if count is None else count}, but this server computes one prefill and does not "
            f"decode; set {name} to {'0 or 1' if least == 0 else '1'}"
        )
        raise DecodingError(text, name=name, value=count, expected=range(least, 2))
    if count < least:
        raise InputError.wrong(name, count, "0 or 1" if least == 0 else "1")


def said_text(
    texts: TokenTexts, token: int, body: SamplingBody, *, continues: bool = False
) -> tuple[str, FinishReason]:
    """Return the text of the answered token, up to the first text in `stop`, and why the answer ends.

    If it `continues` a text, it keeps the blank that tokenizers such as SentencePiece leave out at the start of a text.
    """
    if token in texts.end_tokens:
        return "", "length" if body.ignore_eos else "stop"
    text = texts.text([token], skip_special=bool(body.skip_special_tokens))
    if continues and text:
        text = (texts.utf8(token) or b"").decode(errors="replace")
    finish: FinishReason = "length"
    for stop in [body.stop] if isinstance(body.stop, str) else body.stop or []:
        if stop and stop in text:
            text, finish = text.partition(stop)[0], "stop"
    return text, finish


def usage_of(call: Call, prompt_tokens: Sequence[int], completion_tokens: int) -> CompletionUsage:
    """Return the usage as OpenAI counts it: all tokens of all prompts."""
    prompts, token_text = sum(prompt_tokens), completion_tokens * len(prompt_tokens)
    return CompletionUsage(prompts, token_text, prompts + token_text, CachedDetails(call.cached_tokens))


def event_stream(chunks: Sequence[msgspec.Struct]) -> Response:
    """Return `chunks` as server-sent events. All are computed before the first is sent, so errors have a status."""
    events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
    return Response(b"".join([*events, b"data: [DONE]\n\n"]), media_type="text/event-stream")


ROUTES = (Route("POST", "/v1/completions", complete, (CompletionBody,), (CompletionReply,), has_streams=True),)

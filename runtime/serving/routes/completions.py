"""POST /v1/completions for what one prefill gives: log-probabilities of the prompt, and one token behind it.

The token is the most likely one: temperature 0. `max_tokens` is 16 where it is not given, as in OpenAI's API, and so
refused: decoding is not done here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from fastapi.responses import Response
from msgspec import Meta

from moepass.models.errors import CheckpointError, InputError
from moepass.models.limits import MOST_TOP_TOKENS
from moepass.runtime.serving.questions.request_tree import NO_NUMBERS, RequestTree, TreeAnswer
from moepass.runtime.serving.questions.token_texts import TokenTexts
from moepass.runtime.serving.requests.request import Tokens
from moepass.runtime.serving.routes.errors import DecodingError
from moepass.runtime.serving.routes.prompt_inputs import Inputs, check_answer_size, parse_prompts
from moepass.runtime.serving.routes.service import Call, Priority, Route, Salt, json_response, new_id

# JSON has no infinity; OpenAI writes this for a token that is next to impossible.
LEAST_LOG_PROBABILITY = -9999.0
TopCount = Annotated[int, Meta(ge=0, le=MOST_TOP_TOKENS)]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class CompletionBody(msgspec.Struct):
    prompt: Inputs
    model: str = ""
    max_tokens: int | None = 16
    echo: bool = False
    logprobs: TopCount | None = None
    temperature: float | None = None
    n: int | None = 1
    best_of: int | None = 1
    stop: str | list[str] | None = None
    suffix: str | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    add_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    priority: Priority = 0
    cache_salt: Salt = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CachedDetails(msgspec.Struct):
    cached_tokens: int


class CompletionUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails


class CompletionReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | None
    object: Literal["text_completion"] = "text_completion"


async def complete(call: Call) -> Response:
    body = call.body(CompletionBody)
    check_decoding(body.max_tokens, "max_tokens", least=0)
    check_sampling(body.n, body.temperature, body.presence_penalty, body.frequency_penalty, body.logit_bias)
    if body.best_of not in (None, 1):
        raise InputError.wrong("best_of", body.best_of, "1: the most likely token is the only one that is given")
    if body.suffix:
        raise InputError("suffix is given; this server inserts no text, leave it out", name="suffix")
    call.need_predictions()
    prompts = await call.prepare(_prompts, call, body)
    listed = sum(map(len, prompts)) if body.echo else len(prompts)
    check_answer_size(0 if body.logprobs is None else listed * (1 + body.logprobs))
    trees = []
    for place, prompt in enumerate(prompts):
        tree = RequestTree(call.writer.most_tokens)
        number = tree.add(prompt, f"prompt[{place}]" if len(prompts) > 1 else "prompt")
        if body.max_tokens == 1 or not body.echo or body.logprobs is None:
            tree.read(number, len(prompt) - 1, top=max(1, body.logprobs or 0))
        if body.echo and body.logprobs is not None:
            tree.score(number, body.logprobs)
        trees.append(tree)
    answers = await call.answer_trees(trees, body.cache_salt, body.priority)
    texts = TokenTexts(call.writer.tokenizer, as_ids=body.return_tokens_as_token_ids)
    choices = [
        _choice(index, prompt, body, answer, texts)
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    usage = usage_of(call, [len(prompt) for prompt in prompts], body.max_tokens or 0)
    whole = CompletionReply(new_id("cmpl"), int(time.time()), call.model, choices, usage)
    if not body.stream:
        return json_response(whole)
    options = body.stream_options or StreamOptions()
    chunks = [msgspec.structs.replace(whole, choices=[choice], usage=None) for choice in choices]
    if options.include_usage:
        chunks.append(msgspec.structs.replace(whole, choices=[]))
    return event_stream(chunks)


def _prompts(call: Call, body: CompletionBody) -> list[Tokens]:
    prompts = parse_prompts(call, body.prompt, "prompt")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        return call.writer.encode_plain(texts, add_special=body.add_special_tokens, name="prompt")
    return [prompt for prompt in prompts if not isinstance(prompt, str)]


def _choice(
    index: int, prompt: Tokens, body: CompletionBody, answer: TreeAnswer, texts: TokenTexts
) -> CompletionChoice:
    listed: list[tuple[int, float | None, list[tuple[int, float]] | None]] = []
    if body.echo and body.logprobs is not None:
        scored = answer.scored(0)
        for place, token in enumerate(prompt.tolist()):
            if place == 0:
                listed.append((token, None, None))
                continue
            pairs = zip(scored.top_tokens[place].tolist(), scored.top_log_probabilities[place].tolist(), strict=True)
            listed.append((token, float(scored.log_probabilities[place]), list(pairs)))
    text = texts.text(prompt.tolist()) if body.echo else ""
    finish: Literal["stop", "length"] = "length"
    if body.max_tokens == 1:
        best = answer.top(0, len(prompt) - 1, max(1, body.logprobs or 0))
        token, value = best[0]
        said = texts.text([token])
        if token in texts.end_tokens:
            said, finish = "", "stop"
        for stop in [body.stop] if isinstance(body.stop, str) else body.stop or []:
            if stop and stop in said:
                said, finish = said.partition(stop)[0], "stop"
        text += said
        listed.append((token, value, best[: body.logprobs]))
    found = None if body.logprobs is None else _logprobs(listed, texts)
    return CompletionChoice(index, text, found, finish)


def _logprobs(
    listed: Sequence[tuple[int, float | None, list[tuple[int, float]] | None]], texts: TokenTexts
) -> CompletionLogprobs:
    found = CompletionLogprobs([], [], [], [])
    offset = 0
    for token, value, best in listed:
        name = texts.name(token)
        found.tokens.append(name)
        found.text_offset.append(offset)
        offset += len(name)
        found.token_logprobs.append(None if value is None else at_least(value))
        if best is None or value is None:
            found.top_logprobs.append(None)
            continue
        # The token itself is among them, however unlikely. Others may read alike, and must not take its place.
        listed_here = {name: at_least(value)}
        for other, given in best:
            if other != token:
                called = texts.name(other)
                listed_here[f"token_id:{other}" if called in listed_here else called] = at_least(given)
        found.top_logprobs.append(listed_here)
    return found


def at_least(log_probability: float) -> float:
    """A log-probability that JSON can write. Raises CheckpointError for NaN, which is none."""
    if math.isnan(log_probability):
        raise CheckpointError(NO_NUMBERS, name="output")
    return max(log_probability, LEAST_LOG_PROBABILITY)


def check_decoding(count: int | None, name: str, *, least: int) -> None:
    """Raises DecodingError for more than one token, InputError for fewer than `least`."""
    if count is None or count > 1:
        raise DecodingError(
            f"{name} is {'not given' if count is None else count}, but this server computes one prefill and decodes "
            f"nothing: give {name} {'0 or 1' if least == 0 else '1'}",
            name=name,
            value=count,
            expected=range(least, 2),
        )
    if count < least:
        raise InputError.wrong(name, count, "0 or 1" if least == 0 else "1")


def check_sampling(
    n: int | None,
    temperature: float | None,
    presence_penalty: float | None,
    frequency_penalty: float | None,
    logit_bias: dict[str, float] | None,
) -> None:
    """Raises InputError, naming it, for what would change which token is the most likely one."""
    if n not in (None, 1):
        raise InputError.wrong("n", n, "1: the most likely token is the only one that is given")
    if temperature:
        raise InputError.wrong("temperature", temperature, "0: the one token is the most likely one")
    for name, value in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
        if value:
            raise InputError.wrong(name, value, "0: log-probabilities are the model's own")
    if logit_bias:
        raise InputError("logit_bias is given; log-probabilities are the model's own, leave it out", name="logit_bias")


def usage_of(call: Call, prompt_tokens: Sequence[int], completion_tokens: int) -> CompletionUsage:
    """As OpenAI counts: all tokens of all prompts."""
    prompts, said = sum(prompt_tokens), completion_tokens * len(prompt_tokens)
    return CompletionUsage(prompts, said, prompts + said, CachedDetails(call.cached_tokens))


def event_stream(chunks: Sequence[msgspec.Struct]) -> Response:
    """`chunks` as server-sent events. All is known before the first one, so that errors have their own status."""
    events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
    return Response(b"".join([*events, b"data: [DONE]\n\n"]), media_type="text/event-stream")


ROUTES = (Route("POST", "/v1/completions", complete, (CompletionBody,), (CompletionReply,), has_streams=True),)

"""What all routes stand on: the backend and how it is asked, the prompts, the settings, and one call of a client."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Annotated, Any, ParamSpec, TypeVar

import msgspec
from fastapi.responses import Response
from msgspec import Meta

from moepass.models.errors import InputError
from moepass.models.limits import MOST_BODIES_BYTES, MOST_REQUEST_TOKENS, check_limit, decode_json
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.questions.request_tree import RequestTree, TreeAnswer
from moepass.runtime.serving.requests.answer import Answer, AnswerTimes, Usage
from moepass.runtime.serving.requests.backend import Backend, QueueFullError
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.routes.errors import HttpError
from moepass.runtime.serving.routes.server_settings import ServerSettings

_Kind = TypeVar("_Kind")
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

# Of requests that wait, the one with the lower number runs first.
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
# Requests with different salts share nothing in the cache.
Salt = Annotated[str, Meta(max_length=1024)] | None

# Fields of other servers that would change the prompt or the numbers, with the values that change nothing. Other
# unknown fields are ignored; where these are, the numbers would be for something else than was asked.
_CHANGING_FIELDS: dict[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}, {"enable_thinking": False}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "truncate_prompt_tokens": (None, -1),
    "prompt_logprobs": (None,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "structured_outputs": (None, {}),
    "guided_choice": (None, []),
    "guided_regex": (None,),
    "guided_json": (None,),
    "guided_grammar": (None,),
}

_MISSING = re.compile(r"Object missing required field `(\w+)`")

# Bodies beyond this are made into tokens by another thread, so that others are answered meanwhile. [Empirical]
_SMALL_BODY_BYTES = 1 << 12


@dataclasses.dataclass(slots=True)
class BodyBudget:
    """Bytes of the bodies that are being answered, so that no crowd of clients fills the memory."""

    taken: int = 0

    def take(self, count: int) -> None:
        """Raises QueueFullError where bodies take up all that they may."""
        if self.taken + count > MOST_BODIES_BYTES:
            raise QueueFullError(
                f"requests of {self.taken} bytes are being answered; the limit is {MOST_BODIES_BYTES}",
                retry_after_seconds=1.0,
                value=self.taken,
                expected=MOST_BODIES_BYTES,
            )
        self.taken += count


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    backend: Backend
    writer: PromptWriter
    settings: ServerSettings
    bodies: BodyBudget = dataclasses.field(default_factory=BodyBudget)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


@dataclasses.dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """What the answer to one request took; it `ended` at that time of the clock, in seconds."""

    usage: Usage
    times: AnswerTimes | None
    ended: float


@dataclasses.dataclass(slots=True)
class Call:
    """One request of a client: its body, and what has been spent on it so far."""

    service: Service
    raw: bytes
    id: str
    backend_seconds: float = 0.0
    answered: list[AnsweredRequest] = dataclasses.field(default_factory=list)

    @property
    def writer(self) -> PromptWriter:
        return self.service.writer

    @property
    def model(self) -> str:
        return self.service.settings.model_names[0]

    def json(self) -> Any:
        """The body as plain values. Raises InputError where it is no JSON object, or nested too deep."""
        value = _decode(self.raw, Any)
        if not isinstance(value, dict):
            kind = "null" if value is None else type(value).__name__
            raise InputError(f"the body is a JSON {kind}; it must be an object", name="body")
        return value

    def body(self, kind: type[_Kind]) -> _Kind:
        """The body as `kind`; unknown fields are ignored. Raises InputError, which names what does not fit."""
        # Read for its depth, too, and for a sentence of its own where it is no object.
        for name, given in self.json().items():
            is_known = name in getattr(kind, "__struct_fields__", ())
            if not is_known and name in _CHANGING_FIELDS and given not in _CHANGING_FIELDS[name]:
                raise InputError(
                    f"{name} is given, which is not supported and would change the prompt or the numbers; leave it out",
                    name=name,
                )
        value: _Kind = _decode(self.raw, kind)
        self.check_model(getattr(value, "model", None))
        return value

    def check_model(self, name: str | None) -> None:
        """Raises HttpError 404 for a model that is not served."""
        names = self.service.settings.model_names
        if name and name not in names:
            shown = name if len(name) <= 100 else name[:100] + "…"
            raise HttpError(
                404,
                f"the model {shown!r} is not served here; ask for {' or '.join(map(repr, names))}",
                code="model_not_found",
                name="model",
            )

    def need_predictions(self) -> None:
        """Raises InputError where the model predicts no tokens."""
        if not self.service.backend.status().predicts_tokens:
            raise InputError(
                "this model has no language-model head, so that it gives no probabilities of tokens; ask /classify, "
                "/pooling or /v1/embeddings",
                name="model",
            )

    async def prepare(
        self, function: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs
    ) -> _Result:
        """`function(...)`, in another thread where the body is large."""
        if len(self.raw) <= _SMALL_BODY_BYTES:
            return function(*given, **named)
        return await asyncio.to_thread(function, *given, **named)

    async def answer(self, request: Request, priority: int = 0, *, is_admitted: bool = False) -> Answer:
        """The backend's answer. `is_admitted`: to a part of a call that there is room for."""
        tokens = sum(len(piece.tokens) for piece in request.pieces)
        check_limit("the number of tokens of this request", tokens, MOST_REQUEST_TOKENS, "send it in several parts")
        started = time.monotonic()
        try:
            answer = await self.service.backend.answer(
                request,
                priority=priority,
                timeout_seconds=self.service.settings.timeout_seconds,
                is_admitted=is_admitted,
            )
        finally:
            self.backend_seconds = max(self.backend_seconds, time.monotonic() - started)
        self.answered.append(AnsweredRequest(answer.usage, answer.times, time.time()))
        return answer

    async def answer_tree(self, tree: RequestTree, salt: str | None = None, priority: int = 0) -> TreeAnswer:
        """As `answer`, for what a tree asks."""
        request = await self.prepare(tree.request, self.id, (salt or "").encode())
        return TreeAnswer(tree, await self.answer(request, priority))

    async def answer_trees(
        self, trees: Sequence[RequestTree], salt: str | None = None, priority: int = 0
    ) -> list[TreeAnswer]:
        """Each tree as a request of its own. All are admitted or none; where one fails, the others are cancelled."""
        requests = [tree.request(f"{self.id}-{number}", (salt or "").encode()) for number, tree in enumerate(trees)]
        self.service.backend.check_room()
        answers = await together([self.answer(request, priority, is_admitted=True) for request in requests])
        return [TreeAnswer(tree, answer) for tree, answer in zip(trees, answers, strict=True)]

    @property
    def tokens(self) -> int:
        """Tokens of all requests of this call so far; what they share is counted once in each."""
        return sum(answered.usage.tokens for answered in self.answered)

    @property
    def usage(self) -> TokenUsage:
        """The tokens of all requests of this call so far, as most APIs report them."""
        return TokenUsage(self.tokens, self.tokens)

    @property
    def cached_tokens(self) -> int:
        return sum(answered.usage.cached_tokens for answered in self.answered)


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """A route: its path, what a body may be, what a reply may be, and what answers it.

    With `has_streams` a reply may come as server-sent events, too. `asks_model`: the backend is asked, so that nothing
    is read of a request while that takes none.
    """

    method: str
    path: str
    handler: Callable[[Call], Awaitable[Any]]
    bodies: tuple[Any, ...] = ()
    replies: tuple[Any, ...] = ()
    media_type: str = "application/json"
    has_streams: bool = False
    asks_model: bool = True

    @property
    def fields(self) -> Set[str]:
        """What errors may name: the fields of its bodies, and those that no body may have."""
        known = {name for body in self.bodies for name in body.__struct_fields__}
        return known | _CHANGING_FIELDS.keys() if known else known


class TokenUsage(msgspec.Struct):
    """Tokens of a request; none are decoded, so `completion_tokens` is 0."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmptyReply(msgspec.Struct):
    """Nothing but that it was answered."""


def json_response(value: Any) -> Response:
    """Return `value` as a JSON response with status 200."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def together(awaited: Sequence[Awaitable[_Result]]) -> list[_Result]:
    """The results of all, in order. Where one fails or this is cancelled, all others are cancelled first."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def _decode(raw: bytes, kind: Any) -> Any:
    try:
        return decode_json(raw, kind)
    except InputError as error:
        text = str(error)
        place = text.rpartition("`$.")[2].rstrip("`") if "`$." in text else ""
        missing = _MISSING.match(text)
        name = ".".join(filter(None, (place, missing[1] if missing else ""))) or "body"
        raise InputError(f"the body does not fit: {text}", name=name) from error

"""The basis of all routes: the service with its backend, prompts and settings, and one call of a client."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
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
from moepass.runtime.serving.routes.body_fields import check_fields, rules_of
from moepass.runtime.serving.routes.errors import HttpError
from moepass.runtime.serving.routes.server_settings import ServerSettings

_Body = TypeVar("_Body", bound=msgspec.Struct)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# Among waiting requests, the one with the lowest number runs first.
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
# Requests with different salts do not share cached prefixes.
Salt = Annotated[str, Meta(max_length=1024)] | None

_MISSING = re.compile(r"Object missing required field `(\w+)`")

# Larger bodies are encoded in another thread, so that the event loop can answer other requests. [Empirical]
_SMALL_BODY_BYTES = 1 << 12


@dataclasses.dataclass(slots=True)
class BodyBudget:
    """Counts the bytes of all open bodies, so that many clients together cannot exhaust the memory."""

    taken: int = 0

    def take(self, count: int) -> None:
        """Count this number of bytes. Raise QueueFullError if all open bodies would exceed MOST_BODIES_BYTES."""
        if self.taken + count > MOST_BODIES_BYTES:
            text = f"open requests have bodies of {self.taken} bytes; the limit is {MOST_BODIES_BYTES}; try again later"
            raise QueueFullError(text, retry_after_seconds=1.0, value=self.taken, expected=MOST_BODIES_BYTES)
        self.taken += count


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """The objects that all calls share; `created` is the start of the server in seconds since 1970."""

    backend: Backend
    writer: PromptWriter
    settings: ServerSettings
    bodies: BodyBudget = dataclasses.field(default_factory=BodyBudget)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


@dataclasses.dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """The cost of one request to the backend; `ended` is the time of its answer in seconds since 1970."""

    usage: Usage
    times: AnswerTimes | None
    ended: float


@dataclasses.dataclass(slots=True)
class Call:
    """One HTTP call of a client: its body, and the requests to the backend that were made for it so far.

    `path_values` are the variable parts of its path, by name.
    """

    service: Service
    raw: bytes
    id: str
    path_values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    priority: int = 0
    salt: bytes = b""
    backend_seconds: float = 0.0
    answered: list[AnsweredRequest] = dataclasses.field(default_factory=list)

    @property
    def writer(self) -> PromptWriter:
        """The prompt writer of the checkpoint."""
        return self.service.writer

    @property
    def model(self) -> str:
        """The model name in replies."""
        return self.service.settings.model_names[0]

    def reply_fields(self, prefix: str) -> tuple[str, int, str]:
        """Return the fields of a `CreatedReply`: a random id with this prefix, the time, and the model name."""
        return new_id(prefix), int(time.time()), self.model

    def json(self) -> Any:
        """Return the body as a dict. Raise InputError if it is not a JSON object or is nested too deeply."""
        value = _decode(self.raw, Any)
        if not isinstance(value, dict):
            kind = "array" if isinstance(value, list) else "scalar"
            raise InputError(f"the body is a JSON {kind}; it must be a JSON object", name="body")
        return value

    def body(self, kind: type[_Body]) -> _Body:
        """Return the body as a `kind`, and use its priority and salt for all requests of this call.

        Unknown fields are ignored, unless `body_fields` refuses them. Raises InputError, with the path of the field as
        its name, if the body does not match, and HttpError (404) if the requested model is not served. An empty name
        selects the served model.
        """
        # json() also checks the nesting depth and that the body is an object.
        check_fields(self.json(), kind.__name__, kind.__struct_fields__)
        value: _Body = _decode(self.raw, kind)
        if model := getattr(value, "model", None):
            self.check_model(model)
        self.priority = getattr(value, "priority", 0)
        self.salt = (getattr(value, "cache_salt", None) or "").encode()
        return value

    def check_model(self, name: str) -> None:
        """Raise HttpError (404) if no model is served under `name`."""
        names = self.service.settings.model_names
        if name not in names:
            shown = name if len(name) <= 100 else name[:100] + "…"
            problem = f"this server has no model {shown!r}; use {' or '.join(map(repr, names))}"
            raise HttpError(404, problem, code="model_not_found", name="model")

    def need_predictions(self) -> None:
        """Raise InputError if the model does not predict tokens."""
        if not self.service.backend.status().predicts_tokens:
            raise InputError(
                "this model has no language-model head, so it cannot predict tokens; ask /classify, /pooling or "
                "/v1/embeddings",
                name="model",
            )

    async def prepare(
        self, function: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _Result:
        """Return `function(...)`, computed in another thread if the body is large."""
        if len(self.raw) <= _SMALL_BODY_BYTES:
            return function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)

    async def answer(self, request: Request, *, is_admitted: bool = False) -> Answer:
        """Return the backend's answer. Raise TooLargeError for a request with more than MOST_REQUEST_TOKENS tokens.

        With `is_admitted`, `check_room` has admitted the call already.
        """
        tokens = sum(len(piece.tokens) for piece in request.pieces)
        check_limit("the number of tokens of this request", tokens, MOST_REQUEST_TOKENS, "send it in several parts")
        started = time.monotonic()
        try:
            answer = await self.service.backend.answer(
                request,
                priority=self.priority,
                timeout_seconds=self.service.settings.timeout_seconds,
                is_admitted=is_admitted,
            )
        finally:
            self.backend_seconds = max(self.backend_seconds, time.monotonic() - started)
        self.answered.append(AnsweredRequest(answer.usage, answer.times, time.time()))
        return answer

    async def answer_tree(self, tree: RequestTree) -> TreeAnswer:
        """Return the answer to the request of `tree`, as `answer` does."""
        request = await self.prepare(tree.request, self.id, self.salt)
        return TreeAnswer(tree, await self.answer(request))

    async def answer_trees(self, trees: Sequence[RequestTree]) -> list[TreeAnswer]:
        """Return the answers to several requests. All are admitted, or none; if one fails, the others are cancelled."""
        requests = [tree.request(f"{self.id}-{number}", self.salt) for number, tree in enumerate(trees)]
        self.service.backend.check_room()
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.answer(request, is_admitted=True)) for request in requests]
        except ExceptionGroup as errors:
            failure = errors.exceptions[0]
        if failure is not None:
            raise failure  # outside of the except block, so that its cause and context are kept
        return [TreeAnswer(tree, task.result()) for tree, task in zip(trees, tasks, strict=True)]

    @property
    def tokens(self) -> int:
        """Tokens of all requests of this call so far; tokens shared within a request count once."""
        return sum(answered.usage.tokens for answered in self.answered)

    @property
    def usage(self) -> TokenUsage:
        """The tokens of all requests of this call so far, as most APIs report them."""
        return TokenUsage(self.tokens, self.tokens)

    @property
    def cached_tokens(self) -> int:
        """Tokens of all requests of this call so far that came from the cache."""
        return sum(answered.usage.cached_tokens for answered in self.answered)


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """A route, with the types that its body and its reply may have.

    With `has_streams`, the reply may also be a stream of server-sent events. If the route `asks_model`, its requests
    are refused unread while the queue is full.
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
        """The names of fields that errors may refer to."""
        return {name for body in self.bodies for name in {*body.__struct_fields__, *rules_of(body.__name__)}}


class ModelBody(msgspec.Struct, kw_only=True):
    """The fields that most request bodies have. `cache_salt` separates the cached prefixes of different clients."""

    model: str = ""
    priority: Priority = 0
    cache_salt: Salt = None


class TokenUsage(msgspec.Struct):
    """Tokens of a request; none are decoded, so `completion_tokens` is 0."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class CreatedReply(msgspec.Struct):
    """The first fields of many replies, as `Call.reply_fields` returns them."""

    id: str
    created: int
    model: str


class EmptyReply(msgspec.Struct):
    """An empty JSON object as the reply."""


def json_response(value: Any) -> Response:
    """Return `value` as a JSON response with status 200."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def new_id(prefix: str) -> str:
    """Return a random id with this prefix."""
    return f"{prefix}-{secrets.token_hex(12)}"


def _decode(raw: bytes, kind: Any) -> Any:
    try:
        return decode_json(raw, kind)
    except InputError as error:
        text = str(error)
        path = text.rpartition("`$.")[2].rstrip("`") if "`$." in text else ""
        missing = _MISSING.match(text)
        name = ".".join(filter(None, (path, missing[1] if missing else ""))) or "body"
        raise InputError(f"the body does not match the schema of this route: {text}", name=name) from error

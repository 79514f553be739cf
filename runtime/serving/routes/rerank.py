"""Documents by their relevance to a query: /rerank, /v1/rerank and /v2/rerank, as Cohere's, Jina's and
text-embeddings-inference's clients ask for them.

The last of them sends `texts` and gets a list; the others send `documents` and get an object.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moepass.models.errors import InputError
from moepass.runtime.serving.routes.scores import pair_scores
from moepass.runtime.serving.routes.service import Call, Priority, Route, Salt, new_id


class RerankDocument(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct):
    query: str
    documents: list[str | RerankDocument]
    model: str = ""
    top_n: int | None = None
    return_documents: bool = False
    relevant_spans: Any = None
    priority: Priority = 0
    cache_salt: Salt = None


class RerankResult(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class BilledUnits(msgspec.Struct):
    search_units: int = 1


class UsedTokens(msgspec.Struct):
    input_tokens: int


class RerankMeta(msgspec.Struct):
    tokens: UsedTokens
    billed_units: BilledUnits = msgspec.field(default_factory=BilledUnits)


class RerankUsage(msgspec.Struct):
    total_tokens: int


class RerankReply(msgspec.Struct):
    id: str
    model: str
    results: list[RerankResult]
    meta: RerankMeta
    usage: RerankUsage


class PlainRerankBody(msgspec.Struct):
    """The body of text-embeddings-inference."""

    query: str
    texts: list[str]
    return_text: bool = False
    raw_scores: bool = False
    priority: Priority = 0


class RankedText(msgspec.Struct, omit_defaults=True):
    index: int
    score: float
    text: str | None = None


async def rerank(call: Call) -> RerankReply | list[RankedText]:
    if "texts" in call.json():
        return await _rerank_texts(call)
    body = call.body(RerankBody)
    if body.relevant_spans:
        raise InputError("relevant_spans is given; this server finds no spans, leave it out", name="relevant_spans")
    # 0 is what some clients send for all.
    if body.top_n is not None and body.top_n < 0:
        raise InputError.wrong("top_n", body.top_n, "1 or more, or left out")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    found = await _ranked(call, body.query, texts, "documents", body.cache_salt, body.priority)
    results = [
        RerankResult(index, score, RerankDocument(texts[index]) if body.return_documents else None)
        for index, score in found[: body.top_n or None]
    ]
    return RerankReply(
        new_id("rerank"), call.model, results, RerankMeta(UsedTokens(call.tokens)), RerankUsage(call.tokens)
    )


async def _rerank_texts(call: Call) -> list[RankedText]:
    body = call.body(PlainRerankBody)
    if body.raw_scores:
        raise InputError("raw_scores is given; scores are from 0 to 1 here, leave it out", name="raw_scores")
    found = await _ranked(call, body.query, body.texts, "texts", None, body.priority)
    return [RankedText(index, score, body.texts[index] if body.return_text else None) for index, score in found]


async def _ranked(
    call: Call, query: str, texts: list[str], name: str, salt: str | None, priority: int
) -> list[tuple[int, float]]:
    scores = await pair_scores(call, [(query, text) for text in texts], salt, priority, ("query", name))
    return sorted(enumerate(scores), key=lambda one: -one[1])


ROUTES = tuple(
    Route("POST", path, rerank, (RerankBody, PlainRerankBody), (RerankReply, list[RankedText]))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank")
)

"""Documents ranked by relevance to a query: /rerank, /v1/rerank and /v2/rerank, for three kinds of clients.

Clients of text-embeddings-inference send `texts` and get a list. Clients of Cohere and Jina send `documents` and get an
object.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moepass.models.errors import InputError
from moepass.runtime.serving.routes.scores import pair_scores
from moepass.runtime.serving.routes.service import Call, ModelBody, Priority, Route, new_id


class RerankDocument(msgspec.Struct):
    """A document in a rerank request or its reply."""

    text: str


class RerankBody(ModelBody):
    """The body of Cohere and Jina."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool = False
    relevant_spans: Any = None


class RerankResult(msgspec.Struct, omit_defaults=True):
    """The relevance of one document; `index` is its position in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class BilledUnits(msgspec.Struct):
    """Units that Cohere bills; always 1 search."""

    search_units: int = 1


class UsedTokens(msgspec.Struct):
    """Tokens of the request."""

    input_tokens: int


class RerankMeta(msgspec.Struct):
    """Usage in Cohere's format."""

    tokens: UsedTokens
    billed_units: BilledUnits = msgspec.field(default_factory=BilledUnits)


class RerankUsage(msgspec.Struct):
    """Usage in Jina's format."""

    total_tokens: int


class RerankReply(msgspec.Struct):
    """The reply to a body with `documents`, most relevant first."""

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
    """The relevance of one text; `index` is its position in the request."""

    index: int
    score: float
    text: str | None = None


async def rerank(call: Call) -> RerankReply | list[RankedText]:
    """Rank the documents or texts of the body by relevance."""
    if "texts" in call.json():
        return await _rerank_texts(call)
    body = call.body(RerankBody)
    if body.relevant_spans:
        raise InputError("relevant_spans is not supported; remove it", name="relevant_spans")
    # Some clients send 0 for all documents.
    if body.top_n is not None and body.top_n < 0:
        raise InputError.wrong("top_n", body.top_n, "1 or more, or left out")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    ranked = await _rank(call, body.query, texts, "documents")
    results = [
        RerankResult(index, score, RerankDocument(texts[index]) if body.return_documents else None)
        for index, score in ranked[: body.top_n or None]
    ]
    return RerankReply(
        new_id("rerank"), call.model, results, RerankMeta(UsedTokens(call.tokens)), RerankUsage(call.tokens)
    )


async def _rerank_texts(call: Call) -> list[RankedText]:
    body = call.body(PlainRerankBody)
    if body.raw_scores:
        raise InputError("raw_scores is not supported: scores are always from 0 to 1; remove it", name="raw_scores")
    ranked = await _rank(call, body.query, body.texts, "texts")
    return [RankedText(index, score, body.texts[index] if body.return_text else None) for index, score in ranked]


async def _rank(call: Call, query: str, texts: list[str], name: str) -> list[tuple[int, float]]:
    scores = await pair_scores(call, [(query, text) for text in texts], ("query", name))
    return sorted(enumerate(scores), key=lambda pair: -pair[1])


ROUTES = tuple(
    Route("POST", path, rerank, (RerankBody, PlainRerankBody), (RerankReply, list[RankedText]))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank")
)

"""Documents ranked by relevance to a query: /rerank, /v1/rerank and /v2/rerank, for three kinds of clients.

Clients of text-embeddings-inference send `texts` and get a list. Clients of Cohere and Jina send `documents` and get an
object.
"""

from __future__ import annotations

import msgspec

from moepass.models.errors import InputError
from moepass.runtime.serving.routes.scores import PairBody, pair_scores
from moepass.runtime.serving.routes.service import Call, Route, new_id


class RerankDocument(msgspec.Struct):
    """A document in a rerank request or its reply."""

    text: str


class RerankBody(PairBody):
    """The body of Cohere and Jina, with `documents`, or that of text-embeddings-inference, with `texts`."""

    query: str
    documents: list[str | RerankDocument] | None = None
    texts: list[str] | None = None
    top_n: int | None = None
    return_documents: bool | None = False
    return_text: bool | None = False


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


class RankedText(msgspec.Struct, omit_defaults=True):
    """The relevance of one text; `index` is its position in the request."""

    index: int
    score: float
    text: str | None = None


async def rerank(call: Call) -> RerankReply | list[RankedText]:
    """Rank the documents or texts of the body by relevance."""
    body = call.body(RerankBody)
    if (body.documents is None) == (body.texts is None):
        raise InputError("the body must have either documents or texts, and not both", name="documents")
    # Some clients send 0 for all documents.
    if body.top_n is not None and body.top_n < 0:
        raise InputError.wrong("top_n", body.top_n, "1 or more, or left out")
    name = "documents" if body.texts is None else "texts"
    texts = body.texts or [
        document if isinstance(document, str) else document.text for document in body.documents or ()
    ]
    scores = await pair_scores(call, body, [(body.query, text) for text in texts], ("query", name))
    ranked = sorted(enumerate(scores), key=lambda pair: -pair[1])[: body.top_n or None]
    returns_texts = body.return_documents or body.return_text
    if body.texts is not None:
        return [RankedText(index, score, texts[index] if returns_texts else None) for index, score in ranked]
    results = [
        RerankResult(index, score, RerankDocument(texts[index]) if returns_texts else None) for index, score in ranked
    ]
    return RerankReply(
        new_id("rerank"), call.model, results, RerankMeta(UsedTokens(call.tokens)), RerankUsage(call.tokens)
    )


ROUTES = tuple(
    Route("POST", path, rerank, (RerankBody,), (RerankReply, list[RankedText]))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank")
)

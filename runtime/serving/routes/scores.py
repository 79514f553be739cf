"""Scores of label tokens, and relevance of pairs of texts: /v1/score, /score and /generative_scoring.

/v1/score and /score take SGLang's body (`query`, `items`, `label_token_ids`) or vLLM's (`queries`, `documents`); the
fields distinguish them. SGLang's body asks for the probability of each label token behind query and item, and vLLM's
for one relevance per pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from moepass.models.errors import InputError
from moepass.models.limits import MOST_LABELS
from moepass.runtime.serving.questions.labels import score_labels
from moepass.runtime.serving.questions.relevance import PairTree
from moepass.runtime.serving.questions.request_tree import RequestTree
from moepass.runtime.serving.questions.text_encoding import TextCut
from moepass.runtime.serving.requests.request import Tokens
from moepass.runtime.serving.routes.prompt_inputs import TextOrTokens, check_answer_size, check_count, check_token_ids
from moepass.runtime.serving.routes.service import Call, CreatedReply, ModelBody, Route, TokenUsage
from moepass.runtime.serving.routes.truncation import PooledBody, text_cut

LabelIds = Annotated[list[int], Meta(min_length=1, max_length=MOST_LABELS)]


class LabelScoreBody(ModelBody):
    """SGLang's body. `items` may be a single text. With `apply_softmax`, scores are normalised over the labels."""

    query: TextOrTokens
    items: str | list[TextOrTokens]
    label_token_ids: LabelIds
    apply_softmax: bool = False
    item_first: bool = False
    add_special_tokens: bool = True


class LabelScoreReply(msgspec.Struct):
    """The probabilities of the labels for each item; `label_masses` is the sum over all labels, before the softmax."""

    scores: list[list[float]]
    label_masses: list[float]
    model: str
    usage: TokenUsage
    object: Literal["scoring"] = "scoring"


class PairBody(PooledBody, kw_only=True):
    """Fields of all bodies with queries and documents. An instruction needs a place in the checkpoint's template."""

    instruction: str | None = None
    instruct: str | None = None
    max_tokens_per_query: Annotated[int, Meta(ge=0)] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=0)] | None = None
    use_activation: bool | None = None
    raw_scores: bool | None = False


class PairScoreBody(PairBody):
    """vLLM's body: one query for all documents, or one query for each document."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None


class PairScore(msgspec.Struct):
    """The score of one pair or item."""

    index: int
    score: float
    object: Literal["score"] = "score"


class PairScoreReply(CreatedReply):
    """The reply to vLLM's bodies."""

    data: list[PairScore]
    usage: TokenUsage
    object: Literal["list"] = "list"


class GenerativeBody(LabelScoreBody):
    """vLLM's body of /generative_scoring: the score is the share of the first label."""

    apply_softmax: bool = True


async def score(call: Call) -> LabelScoreReply | PairScoreReply:
    """Answer either body of /v1/score."""
    if "label_token_ids" not in call.json():
        return await _score_pairs(call)
    body = call.body(LabelScoreBody)
    scores, masses = await _label_scores(call, body)
    return LabelScoreReply(scores, masses, call.model, call.usage)


async def generative_score(call: Call) -> PairScoreReply:
    """Return the share of the first label for each item."""
    body = call.body(GenerativeBody)
    scores, _ = await _label_scores(call, body)
    return _pair_reply(call, [labels[0] for labels in scores])


async def _score_pairs(call: Call) -> PairScoreReply:
    body = call.body(PairScoreBody)
    names = ("text_1" if body.queries is None else "queries", "text_2" if body.documents is None else "documents")
    first, second = (getattr(body, name) for name in names)
    if first is None or second is None:
        text = "the body must have query, items and label_token_ids, or queries and documents"
        raise InputError(text, name="queries")
    queries, documents = ([field] if isinstance(field, str) else field for field in (first, second))
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents) or not documents:
        text = f"there are {len(queries)} queries and {len(documents)} documents; send one query, or one per document"
        raise InputError(text, name="queries", value=len(queries), expected=len(documents))
    pairs = list(zip(queries, documents, strict=True))
    return _pair_reply(call, await pair_scores(call, body, pairs, names))


def _pair_reply(call: Call, scores: Sequence[float]) -> PairScoreReply:
    data = [PairScore(index, value) for index, value in enumerate(scores)]
    return PairScoreReply(*call.reply_fields("score"), data, call.usage)


async def _label_scores(call: Call, body: LabelScoreBody) -> tuple[list[list[float]], list[float]]:
    items = [body.items] if isinstance(body.items, str) else body.items
    check_count(items, "items")
    check_token_ids(call, body.label_token_ids, "label_token_ids")
    if len(set(body.label_token_ids)) < len(body.label_token_ids):
        raise InputError("label_token_ids contains an id twice; ids must be unique", name="label_token_ids")
    call.need_predictions()
    check_answer_size(len(items) * len(body.label_token_ids))
    sequences = await call.prepare(_joined, call, body, items)
    tree = RequestTree(call.writer.most_tokens)
    numbers = [tree.add(tokens, f"items[{index}] with the query") for index, tokens in enumerate(sequences)]
    for number in numbers:
        tree.read(number, tree.length(number) - 1, body.label_token_ids)
    answer = await call.answer_tree(tree)
    labels = [(token,) for token in body.label_token_ids]
    scores, masses = [], []
    for number in numbers:
        log_probabilities = answer.log_probabilities(number, tree.length(number) - 1, body.label_token_ids)
        probabilities = [math.exp(value) for value in log_probabilities]
        masses.append(math.fsum(probabilities))
        if body.apply_softmax:
            probabilities = list(score_labels(labels, log_probabilities).probabilities)
        scores.append(probabilities)
    return scores, masses


def _joined(call: Call, body: LabelScoreBody, items: Sequence[Any]) -> list[Tokens]:
    query: Any = body.query
    for index, item in enumerate(items):
        if isinstance(item, str) != isinstance(query, str):
            kinds = ["is a text" if isinstance(value, str) else "has token ids" for value in (item, query)]
            problem = f"items[{index}] {kinds[0]}, but the query {kinds[1]}"
            raise InputError(f"{problem}; send texts or token ids for both", name="items")
    joined = [item + query if body.item_first else query + item for item in items]
    if isinstance(query, str):
        return call.writer.encode_plain(joined, add_special=body.add_special_tokens, name="query with an item")
    check_token_ids(call, query, "query")
    for index, item in enumerate(items):
        check_token_ids(call, item, f"items[{index}]")
    return [np.array(tokens, np.int32) for tokens in joined]


async def pair_scores(
    call: Call, body: PairBody, pairs: Sequence[tuple[str, str]], names: tuple[str, str]
) -> list[float]:
    """Return the relevance of each pair's document to its query, from 0 to 1, or its log-odds if the body asks for it.

    Errors contain the `names` of queries and documents.
    """
    check_count(pairs, names[1])
    if call.service.backend.status().vector != "class scores":
        call.need_predictions()
    tree = await call.prepare(_pair_tree, call, body, pairs, names)
    is_raw = bool(body.raw_scores) or body.use_activation is False
    return tree.scores(await call.answer_tree(tree.tree), is_raw=is_raw)


def _pair_tree(call: Call, body: PairBody, pairs: Sequence[tuple[str, str]], names: tuple[str, str]) -> PairTree:
    status = call.service.backend.status()
    instruction = body.instruction or body.instruct or None
    if instruction is not None and not call.writer.prompt.takes_instruction:
        field = "instruction" if body.instruction else "instruct"
        text = (
            f"{field} is not supported by this checkpoint, because its prompt.json has no pair_template with "
            "{instruction}; remove it"
        )
        raise InputError(text, name=field, value=instruction)
    if body.instruct and body.instruction and body.instruct != body.instruction:
        raise InputError("instruct and instruction differ; send one of them", name="instruct", value=body.instruct)
    queries = _fitting(call, [query for query, _ in pairs], body.max_tokens_per_query, "max_tokens_per_query", names[0])
    documents = _fitting(call, [text for _, text in pairs], body.max_tokens_per_doc, "max_tokens_per_doc", names[1])
    return PairTree(
        call.writer,
        list(zip(queries, documents, strict=True)),
        by_class_scores=status.vector == "class scores",
        padding=status.padding_token,
        names=names,
        instruction=instruction,
        cut=text_cut(call, body),
    )


def _fitting(call: Call, texts: Sequence[str], most_tokens: int | None, field: str, name: str) -> Sequence[str]:
    """Return `texts` without what is beyond `most_tokens`, the value of `field`; 0 is no limit, as in vLLM."""
    if not most_tokens:
        return texts
    cut = TextCut(most_tokens, "right", field)
    fitting = {text: call.writer.fit(text, cut, name) for text in set(texts)}
    return [fitting[text] for text in texts]


ROUTES = (
    Route("POST", "/v1/score", score, (LabelScoreBody, PairScoreBody), (LabelScoreReply, PairScoreReply)),
    Route("POST", "/score", score, (LabelScoreBody, PairScoreBody), (LabelScoreReply, PairScoreReply)),
    Route("POST", "/generative_scoring", generative_score, (GenerativeBody,), (PairScoreReply,)),
)

"""What a model's head gives for whole texts: classes (/classify, /predict) and embeddings (/v1/embeddings, /embed).

A checkpoint whose `prompt.json` names labels classifies, too: its classes are these labels.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from moepass.models.errors import InputError
from moepass.runtime.serving.questions.labels import LabelReads, ask_labels, encode_labels
from moepass.runtime.serving.questions.relevance import class_probabilities
from moepass.runtime.serving.questions.request_tree import RequestTree
from moepass.runtime.serving.requests.answer import Floats
from moepass.runtime.serving.requests.request import Tokens
from moepass.runtime.serving.routes.prompt_inputs import Inputs, check_answer_size, check_count, parse_prompts
from moepass.runtime.serving.routes.service import Call, Priority, Route, Salt, TokenUsage, new_id


class VectorBody(msgspec.Struct):
    """OpenAI's body of /v1/embeddings, and vLLM's of /classify and /pooling."""

    input: Inputs
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    task: str | None = None
    priority: Priority = 0
    cache_salt: Salt = None


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingReply(msgspec.Struct):
    model: str
    data: list[Embedding]
    usage: TokenUsage
    object: Literal["list"] = "list"


class PlainBody(msgspec.Struct):
    """The body of /embed, as text-embeddings-inference has it."""

    inputs: Inputs
    normalize: bool = True
    dimensions: int | None = None
    priority: Priority = 0


class ClassifiedText(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ClassifiedText]
    usage: TokenUsage
    object: Literal["list"] = "list"


class PooledText(msgspec.Struct):
    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class PoolingReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[PooledText]
    usage: TokenUsage
    object: Literal["list"] = "list"


class PredictBody(msgspec.Struct):
    """The body of /predict, as text-embeddings-inference has it: a text, a pair of texts, or a list of such lists."""

    inputs: str | list[str | list[str]]
    raw_scores: bool = False
    priority: Priority = 0


class Prediction(msgspec.Struct):
    label: str
    score: float


async def embed(call: Call) -> EmbeddingReply:
    body = call.body(VectorBody)
    found = await _embeddings(call, "input", body.input, body.dimensions, body.cache_salt, body.priority)
    data = [Embedding(index, _written(vector, body)) for index, vector in enumerate(map(_normalised, found))]
    return EmbeddingReply(call.model, data, call.usage)


async def embed_plain(call: Call) -> list[list[float]]:
    body = call.body(PlainBody)
    found = await _embeddings(call, "inputs", body.inputs, body.dimensions, None, body.priority)
    return [(_normalised(vector) if body.normalize else vector).tolist() for vector in found]


async def classify(call: Call) -> ClassifyReply:
    body = call.body(VectorBody)
    prompts = await call.prepare(parse_prompts, call, body.input, "input")
    names = _class_names(call)
    data = []
    for index, scores in enumerate(await _class_scores(call, "input", prompts, body.cache_salt, body.priority)):
        data.append(ClassifiedText(index, names[_best(scores)], scores, len(scores)))
    return ClassifyReply(new_id("classify"), int(time.time()), call.model, data, call.usage)


async def pool(call: Call) -> PoolingReply:
    body = call.body(VectorBody)
    kind = call.service.backend.status().vector
    known = {"class scores": ("classify", "score"), "embedding": ("embed", "encode")}.get(kind or "", ())
    if body.task is not None and body.task not in known:
        raise InputError.wrong("task", body.task, f"one of {', '.join(known) or 'none, for this model pools nothing'}")
    if kind == "class scores":
        prompts = await call.prepare(parse_prompts, call, body.input, "input")
        scores = await _class_scores(call, "input", prompts, body.cache_salt, body.priority)
        found = [np.array(values, np.float32) for values in scores]
    else:
        vectors = await _embeddings(call, "input", body.input, body.dimensions, body.cache_salt, body.priority)
        found = [_normalised(vector) for vector in vectors]
    data = [PooledText(index, _written(vector, body)) for index, vector in enumerate(found)]
    return PoolingReply(new_id("pool"), int(time.time()), call.model, data, call.usage)


async def predict(call: Call) -> list[Prediction] | list[list[Prediction]]:
    body = call.body(PredictBody)
    texts: list[list[str]] = [[body.inputs]] if isinstance(body.inputs, str) else _texts(body.inputs)
    check_count(texts, "inputs")
    prompts = await call.prepare(_joined, call, texts)
    found = await _class_scores(call, "inputs", prompts, None, body.priority, is_raw=body.raw_scores)
    names = _class_names(call)
    sorted_ = [
        sorted(
            (Prediction(name, score) for name, score in zip(names, scores, strict=True)),
            key=lambda prediction: -prediction.score,
        )
        for scores in found
    ]
    is_batch = not isinstance(body.inputs, str) and not isinstance(body.inputs[0], str)
    return sorted_ if is_batch else sorted_[0]


def _texts(inputs: Sequence[str | list[str]]) -> list[list[str]]:
    check_count(inputs, "inputs")
    alone = [text for text in inputs if isinstance(text, str)]
    texts = [text for text in inputs if isinstance(text, list)]
    if alone and texts:
        raise InputError("inputs mixes texts and lists of texts; give one kind", name="inputs")
    for text in texts or [alone]:
        if not 1 <= len(text) <= 2:
            raise InputError(
                f"inputs has {len(text)} texts together; give one, or two that belong together, or a list of such",
                name="inputs",
                value=len(text),
                expected="1 or 2",
            )
    return texts or [alone]


def _joined(call: Call, texts: Sequence[Sequence[str]]) -> list[str] | list[Tokens]:
    if all(len(text) == 1 for text in texts):
        return [text[0] for text in texts]
    if call.service.backend.status().vector != "class scores":
        raise InputError("this model classifies single texts; send no pairs", name="inputs")
    return [
        call.writer.encode_pairs([(text[0], text[1])], ("inputs", "inputs"))[0]
        if len(text) == 2
        else call.writer.encode_plain([text[0]], name="inputs")[0]
        for text in texts
    ]


async def _embeddings(
    call: Call, name: str, inputs: Inputs, dimensions: int | None, salt: str | None, priority: int
) -> list[Floats]:
    status = call.service.backend.status()
    if status.vector != "embedding":
        raise InputError(
            "this model gives no embeddings"
            + (": its head tells classes apart, ask /classify" if status.vector else ""),
            name="model",
        )
    prompts = await call.prepare(parse_prompts, call, inputs, name)
    found = await _vectors(call, name, prompts, salt, priority)
    size = len(found[0])
    check_answer_size(size * len(found))
    if dimensions not in (None, size):
        raise InputError.wrong("dimensions", dimensions, f"{size}, which this model has, or left out")
    return found


async def _vectors(
    call: Call, name: str, prompts: list[str] | list[Tokens], salt: str | None, priority: int
) -> list[Floats]:
    trees = []
    for place, tokens in enumerate(await call.prepare(_encoded, call, name, prompts)):
        tree = RequestTree(call.writer.most_tokens)
        number = tree.add(tokens, f"{name}[{place}]")
        tree.vector(number, call.writer.prompt.vector)
        trees.append(tree)
    return [answer.vector(0) for answer in await call.answer_trees(trees, salt, priority)]


def _encoded(call: Call, name: str, prompts: list[str] | list[Tokens]) -> list[Tokens]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return call.writer.encode_plain(texts, name=name) if texts else prompts  # type: ignore[return-value]


def _class_names(call: Call) -> tuple[str, ...]:
    status = call.service.backend.status()
    return status.class_names if status.vector == "class scores" else call.writer.prompt.labels


async def _class_scores(
    call: Call,
    name: str,
    prompts: list[str] | list[Tokens],
    salt: str | None,
    priority: int,
    *,
    is_raw: bool = False,
) -> list[list[float]]:
    status, writer = call.service.backend.status(), call.writer
    if status.vector == "class scores":
        scores = await _vectors(call, name, prompts, salt, priority)
        return [values.tolist() if is_raw else class_probabilities(values) for values in scores]
    if not writer.prompt.labels:
        raise InputError(
            "this model has no head that classifies, and its prompt.json names no labels; ask /v1/decisions, which "
            "takes them in the request",
            name="model",
        )
    check_answer_size(len(prompts) * len(writer.prompt.labels))
    trees, reads = await call.prepare(_label_trees, call, name, prompts)
    answers = await call.answer_trees(trees, salt, priority)
    found = [read.scores(answer) for read, answer in zip(reads, answers, strict=True)]
    return [list(scores.log_probabilities if is_raw else scores.probabilities) for scores in found]


def _label_trees(
    call: Call, name: str, prompts: list[str] | list[Tokens]
) -> tuple[list[RequestTree], list[LabelReads]]:
    writer = call.writer
    trees, reads = [], []
    for place, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise InputError(f"{name} holds tokens; this model classifies texts, in its own prompt", name=name)
        rendered = writer.ask(prompt, f"{name}[{place}]")
        labels = encode_labels(writer.encoder, rendered, writer.prompt.labels)
        tree = RequestTree(writer.most_tokens)
        reads.append(ask_labels(tree, writer.encode([rendered])[0], labels, f"{name}[{place}]"))
        trees.append(tree)
    return trees, reads


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def _normalised(vector: Floats) -> Floats:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector if length == 0 else (vector / length).astype(np.float32)


def _written(vector: Floats, body: VectorBody) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]


ROUTES = (
    Route("POST", "/v1/embeddings", embed, (VectorBody,), (EmbeddingReply,)),
    Route("POST", "/embed", embed_plain, (PlainBody,), (list[list[float]],)),
    Route("POST", "/classify", classify, (VectorBody,), (ClassifyReply,)),
    Route("POST", "/v1/classify", classify, (VectorBody,), (ClassifyReply,)),
    Route("POST", "/pooling", pool, (VectorBody,), (PoolingReply,)),
    Route("POST", "/predict", predict, (PredictBody,), (list[Prediction], list[list[Prediction]])),
)

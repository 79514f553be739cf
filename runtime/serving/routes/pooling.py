"""Outputs of a model's head for whole texts: classes (/classify, /predict) and embeddings (/v1/embeddings, /embed).

A checkpoint with labels in its `prompt.json` classifies too; its classes are these labels.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from moepass.models.errors import InputError
from moepass.runtime.serving.questions.labels import LabelReads, ask_labels, encode_labels
from moepass.runtime.serving.questions.relevance import class_values
from moepass.runtime.serving.questions.request_tree import RequestTree
from moepass.runtime.serving.requests.answer import Floats
from moepass.runtime.serving.requests.request import Tokens
from moepass.runtime.serving.routes import prompt_inputs
from moepass.runtime.serving.routes.service import Call, CreatedReply, ModelBody, Priority, Route, TokenUsage


class VectorBody(ModelBody):
    """OpenAI's body of /v1/embeddings, and vLLM's of /classify and /pooling."""

    input: prompt_inputs.Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    task: str | None = None


class Embedding(msgspec.Struct):
    """The embedding of one input."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingReply(msgspec.Struct):
    """The reply of /v1/embeddings."""

    model: str
    data: list[Embedding]
    usage: TokenUsage
    object: Literal["list"] = "list"


class PlainBody(msgspec.Struct):
    """The body of /embed, as in text-embeddings-inference."""

    inputs: prompt_inputs.Inputs
    normalize: bool = True
    dimensions: int | None = None
    priority: Priority = 0


class ClassifiedText(msgspec.Struct):
    """The class of one input, with the probabilities of all classes."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(CreatedReply):
    """The reply of /classify."""

    data: list[ClassifiedText]
    usage: TokenUsage
    object: Literal["list"] = "list"


class PooledText(msgspec.Struct):
    """The pooled output for one input."""

    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class PoolingReply(CreatedReply):
    """The reply of /pooling."""

    data: list[PooledText]
    usage: TokenUsage
    object: Literal["list"] = "list"


class PredictBody(msgspec.Struct):
    """The body of /predict, as in text-embeddings-inference: a text, a pair of texts, or a list of texts or pairs."""

    inputs: str | list[str | list[str]]
    raw_scores: bool = False
    priority: Priority = 0


class Prediction(msgspec.Struct):
    """A class and its score."""

    label: str
    score: float


async def embed(call: Call) -> EmbeddingReply:
    """Return normalised embeddings in OpenAI's format."""
    body = call.body(VectorBody)
    vectors = await _embeddings(call, "input", body.input, body.dimensions)
    data = [Embedding(index, _encode_vector(_normalise(vector), body)) for index, vector in enumerate(vectors)]
    return EmbeddingReply(call.model, data, call.usage)


async def embed_plain(call: Call) -> list[list[float]]:
    """Return embeddings as plain lists, normalised unless the body says otherwise."""
    body = call.body(PlainBody)
    vectors = await _embeddings(call, "inputs", body.inputs, body.dimensions)
    return [(_normalise(vector) if body.normalize else vector).tolist() for vector in vectors]


async def classify(call: Call) -> ClassifyReply:
    """Return the most likely class of each input, with the probabilities of all classes."""
    body = call.body(VectorBody)
    prompts = await call.prepare(prompt_inputs.parse_prompts, call, body.input, "input")
    names = _class_names(call)
    data = [
        ClassifiedText(index, names[scores.index(max(scores))], scores, len(scores))
        for index, scores in enumerate(await _class_scores(call, "input", prompts))
    ]
    return ClassifyReply(*call.reply_fields("classify"), data, call.usage)


async def pool(call: Call) -> PoolingReply:
    """Return class probabilities or normalised embeddings, depending on the model's head."""
    body = call.body(VectorBody)
    kind = call.service.backend.status().vector
    tasks = {"class scores": ("classify", "score"), "embedding": ("embed", "encode")}.get(kind or "", ())
    if body.task is not None and body.task not in tasks:
        supported = f"one of {', '.join(tasks)}" if tasks else "left out, because this model supports no pooling task"
        raise InputError.wrong("task", body.task, supported)
    if kind == "class scores":
        prompts = await call.prepare(prompt_inputs.parse_prompts, call, body.input, "input")
        pooled = [np.array(scores, np.float32) for scores in await _class_scores(call, "input", prompts)]
    else:
        pooled = [_normalise(vector) for vector in await _embeddings(call, "input", body.input, body.dimensions)]
    data = [PooledText(index, _encode_vector(vector, body)) for index, vector in enumerate(pooled)]
    return PoolingReply(*call.reply_fields("pool"), data, call.usage)


async def embed_or_predict(call: Call) -> list[list[float]] | list[Prediction] | list[list[Prediction]]:
    """Return classes from a classifier, embeddings from another model, as TEI does at its root."""
    is_classifier = call.service.backend.status().vector == "class scores"
    return await (predict(call) if is_classifier else embed_plain(call))


async def predict(call: Call) -> list[Prediction] | list[list[Prediction]]:
    """Return all classes with their scores, best first."""
    body = call.body(PredictBody)
    texts: list[list[str]] = [[body.inputs]] if isinstance(body.inputs, str) else _texts(body.inputs)
    prompt_inputs.check_count(texts, "inputs")
    prompts = await call.prepare(_joined, call, texts)
    all_scores = await _class_scores(call, "inputs", prompts, is_raw=body.raw_scores)
    names = _class_names(call)
    predictions = [
        sorted(
            (Prediction(name, score) for name, score in zip(names, scores, strict=True)),
            key=lambda prediction: -prediction.score,
        )
        for scores in all_scores
    ]
    is_batch = not isinstance(body.inputs, str) and not isinstance(body.inputs[0], str)
    return predictions if is_batch else predictions[0]


def _texts(inputs: Sequence[str | list[str]]) -> list[list[str]]:
    prompt_inputs.check_count(inputs, "inputs")
    single_texts = [text for text in inputs if isinstance(text, str)]
    texts = [text for text in inputs if isinstance(text, list)]
    if single_texts and texts:
        raise InputError("inputs mixes texts and lists of texts; send texts only, or lists only", name="inputs")
    for text in texts or [single_texts]:
        if not 1 <= len(text) <= 2:
            problem = f"inputs has a list of {len(text)} texts; send one text or a pair of texts, or a list of these"
            raise InputError(problem, name="inputs", value=len(text), expected="1 or 2")
    return texts or [single_texts]


def _joined(call: Call, texts: Sequence[Sequence[str]]) -> list[str] | list[Tokens]:
    if all(len(text) == 1 for text in texts):
        return [text[0] for text in texts]
    if call.service.backend.status().vector != "class scores":
        raise InputError("this model classifies single texts, not pairs; send [[text], [text], ...]", name="inputs")
    return [
        call.writer.encode_pairs([(text[0], text[1])], ("inputs", "inputs"))[0]
        if len(text) == 2
        else call.writer.encode_plain([text[0]], name="inputs")[0]
        for text in texts
    ]


async def _embeddings(call: Call, name: str, inputs: prompt_inputs.Inputs, dimensions: int | None) -> list[Floats]:
    status = call.service.backend.status()
    if status.vector != "embedding":
        text = "this model returns no embeddings" + (
            ", because its head classifies; ask /classify" if status.vector else "; serve an embedding model"
        )
        raise InputError(text, name="model")
    prompts = await call.prepare(prompt_inputs.parse_prompts, call, inputs, name)
    vectors = await _vectors(call, name, prompts)
    size = len(vectors[0])
    prompt_inputs.check_answer_size(size * len(vectors))
    if dimensions not in (None, size):
        raise InputError.wrong("dimensions", dimensions, f"{size}, the size of this model's embeddings, or left out")
    return vectors


async def _vectors(call: Call, name: str, prompts: list[str] | list[Tokens]) -> list[Floats]:
    trees = []
    for index, tokens in enumerate(await call.prepare(prompt_inputs.encode_prompts, call, prompts, name)):
        tree = RequestTree(call.writer.most_tokens)
        number = tree.add(tokens, f"{name}[{index}]")
        tree.vector(number, call.writer.prompt.vector)
        trees.append(tree)
    return [answer.vector(0) for answer in await call.answer_trees(trees)]


def _class_names(call: Call) -> tuple[str, ...]:
    status = call.service.backend.status()
    return status.class_names if status.vector == "class scores" else call.writer.prompt.labels


async def _class_scores(
    call: Call, name: str, prompts: list[str] | list[Tokens], *, is_raw: bool = False
) -> list[list[float]]:
    status, writer = call.service.backend.status(), call.writer
    if status.vector == "class scores":
        vectors = await _vectors(call, name, prompts)
        return [scores.tolist() if is_raw else class_values(scores, status.class_activation) for scores in vectors]
    if not writer.prompt.labels:
        raise InputError(
            "this model has no classification head, and its prompt.json has no labels; ask /v1/decisions, which takes "
            "labels in the request",
            name="model",
        )
    prompt_inputs.check_answer_size(len(prompts) * len(writer.prompt.labels))
    trees, reads = await call.prepare(_label_trees, call, name, prompts)
    answers = await call.answer_trees(trees)
    label_scores = [read.scores(answer) for read, answer in zip(reads, answers, strict=True)]
    return [list(scores.log_probabilities if is_raw else scores.probabilities) for scores in label_scores]


def _label_trees(
    call: Call, name: str, prompts: list[str] | list[Tokens]
) -> tuple[list[RequestTree], list[LabelReads]]:
    writer = call.writer
    trees, reads = [], []
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            text = f"{name} contains token ids, but this model inserts texts into its own prompt; send texts"
            raise InputError(text, name=name)
        rendered = writer.ask(prompt, f"{name}[{index}]")
        labels = encode_labels(writer.encoder, rendered, writer.prompt.labels)
        tree = RequestTree(writer.most_tokens)
        reads.append(ask_labels(tree, writer.encode([rendered])[0], labels, f"{name}[{index}]"))
        trees.append(tree)
    return trees, reads


def _normalise(vector: Floats) -> Floats:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector if length == 0 else (vector / length).astype(np.float32)


def _encode_vector(vector: Floats, body: VectorBody) -> list[float] | str:
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

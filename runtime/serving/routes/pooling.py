"""Outputs of a model's head for whole texts: classes (/classify, /predict) and embeddings (/v1/embeddings, /embed).

A checkpoint with labels in its `prompt.json` classifies too; its classes are these labels.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from moepass.models.errors import InputError
from moepass.runtime.serving.questions.labels import LabelReads, ask_labels, encode_labels
from moepass.runtime.serving.questions.relevance import class_values
from moepass.runtime.serving.questions.request_tree import RequestTree
from moepass.runtime.serving.questions.text_encoding import TextCut
from moepass.runtime.serving.requests.answer import Floats
from moepass.runtime.serving.requests.backend import ClassActivation
from moepass.runtime.serving.requests.request import Tokens
from moepass.runtime.serving.routes import prompt_inputs
from moepass.runtime.serving.routes.completions import json_log_probability
from moepass.runtime.serving.routes.service import Call, CreatedReply, Route, TokenUsage
from moepass.runtime.serving.routes.truncation import PooledBody, text_cut

# Names that clients of Cohere, Jina, NVIDIA and sentence-transformers use for the same prompt.
_PROMPT_SYNONYMS = (
    ("query", "search_query", "retrieval.query"),
    ("document", "passage", "search_document", "retrieval.passage"),
)
# Hugging Face's names of activations.
_ACTIVATIONS: dict[str | None, ClassActivation | None] = {
    None: None,
    "none": "identity",
    "sigmoid": "sigmoid",
    "softmax": "softmax",
}


class VectorBody(PooledBody, kw_only=True):
    """Fields of all bodies whose texts are embedded. Three of them ask for vectors that are not normalised.

    `prompt_name` and `input_type` choose one of the checkpoint's `prompts`, which is put before each text.
    """

    add_special_tokens: bool = True
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    normalized: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None


class EmbeddingBody(VectorBody):
    """OpenAI's body of /v1/embeddings. `task` is Jina's name for a prompt."""

    input: prompt_inputs.Inputs
    encoding_format: Literal["float", "base64"] = "float"
    task: str | None = None


class PoolingBody(VectorBody):
    """vLLM's body of /pooling."""

    input: prompt_inputs.Inputs
    encoding_format: Literal["float", "base64"] = "float"
    task: str | None = None


class ClassifyBody(PooledBody):
    """vLLM's body of /classify."""

    input: prompt_inputs.Inputs
    add_special_tokens: bool = True
    use_activation: bool | None = None


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


class PlainBody(VectorBody):
    """The body of /embed, as in text-embeddings-inference."""

    inputs: prompt_inputs.Inputs


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


class PredictParameters(msgspec.Struct):
    """Options of Hugging Face's client: the number of classes to return, and the function that makes their scores."""

    top_k: Annotated[int, Meta(ge=1)] | None = None
    function_to_apply: Literal["none", "sigmoid", "softmax"] | None = None


class PredictBody(PooledBody):
    """The body of /predict, as in text-embeddings-inference: a text, a pair of texts, or a list of texts or pairs."""

    inputs: str | list[str | list[str]]
    raw_scores: bool = False
    parameters: PredictParameters | None = None


class Prediction(msgspec.Struct):
    """A class and its score."""

    label: str
    score: float


async def embed(call: Call) -> EmbeddingReply:
    """Return embeddings in OpenAI's format, normalised unless the body says otherwise."""
    body = call.body(EmbeddingBody)
    vectors = await _embeddings(call, "input", body.input, body, task=body.task)
    data = [Embedding(index, _encode_vector(vector, body)) for index, vector in enumerate(vectors)]
    return EmbeddingReply(call.model, data, call.usage)


async def embed_plain(call: Call) -> list[list[float]]:
    """Return embeddings as plain lists, normalised unless the body says otherwise."""
    body = call.body(PlainBody)
    return [vector.tolist() for vector in await _embeddings(call, "inputs", body.inputs, body)]


async def classify(call: Call) -> ClassifyReply:
    """Return the most likely class of each input, with the probabilities of all classes."""
    body = call.body(ClassifyBody)
    names = _class_names(call)
    data = [
        ClassifiedText(index, names[scores.index(max(scores))], scores, len(scores))
        for index, scores in enumerate(await _classes(call, body.input, body))
    ]
    return ClassifyReply(*call.reply_fields("classify"), data, call.usage)


async def pool(call: Call) -> PoolingReply:
    """Return class probabilities or normalised embeddings, depending on the model's head, unless asked for others."""
    body = call.body(PoolingBody)
    kind = call.service.backend.status().vector
    tasks = {"class scores": ("classify", "score"), "embedding": ("embed", "encode")}.get(kind or "", ())
    if body.task is not None and body.task not in tasks:
        supported = f"one of {', '.join(tasks)}" if tasks else "left out, because this model supports no pooling task"
        raise InputError.wrong("task", body.task, supported)
    if kind == "class scores":
        for name in ("dimensions", "normalize", "normalized", "prompt_name", "input_type"):
            if (value := getattr(body, name)) is not None:
                raise InputError.wrong(name, value, "left out, because this model classifies and returns no embeddings")
        pooled = [np.array(scores, np.float32) for scores in await _classes(call, body.input, body)]
    else:
        pooled = await _embeddings(call, "input", body.input, body)
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
    parameters = body.parameters or PredictParameters()
    applied = _ACTIVATIONS[parameters.function_to_apply]
    prompts = await call.prepare(_joined, call, texts, text_cut(call, body))
    all_scores = await _class_scores(call, "inputs", prompts, body, "identity" if body.raw_scores else applied)
    names = _class_names(call)
    predictions = [
        sorted(
            (Prediction(name, score) for name, score in zip(names, scores, strict=True)),
            key=lambda prediction: -prediction.score,
        )[: parameters.top_k]
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


def _joined(call: Call, texts: Sequence[Sequence[str]], cut: TextCut | None) -> list[str] | list[Tokens]:
    if all(len(text) == 1 for text in texts):
        return [text[0] for text in texts]
    if call.service.backend.status().vector != "class scores":
        raise InputError("this model classifies single texts, not pairs; send [[text], [text], ...]", name="inputs")
    return [
        call.writer.encode_pairs([(text[0], text[1])], ("inputs", "inputs"), cut=cut)[0]
        if len(text) == 2
        else call.writer.encode_plain([text[0]], name="inputs", cut=cut)[0]
        for text in texts
    ]


async def _embeddings(
    call: Call, name: str, inputs: prompt_inputs.Inputs, body: VectorBody, task: str | None = None
) -> list[Floats]:
    status = call.service.backend.status()
    if status.vector != "embedding":
        text = "this model returns no embeddings" + (
            ", because its head classifies; ask /classify" if status.vector else "; serve an embedding model"
        )
        raise InputError(text, name="model")
    prompts = await call.prepare(prompt_inputs.parse_prompts, call, inputs, name)
    prefix = _prefix(call, {"prompt_name": body.prompt_name, "input_type": body.input_type, "task": task}, prompts)
    vectors = await _vectors(call, name, prompts, body, add_special=body.add_special_tokens, prefix=prefix)
    size = len(vectors[0])
    prompt_inputs.check_answer_size(size * len(vectors))
    if body.dimensions not in (None, size):
        expected = f"{size}, the size of this model's embeddings, or left out"
        raise InputError.wrong("dimensions", body.dimensions, expected)
    is_raw = False in (body.use_activation, body.normalize, body.normalized)
    return vectors if is_raw else [_normalise(vector) for vector in vectors]


def _prefix(call: Call, names: Mapping[str, str | None], prompts: Sequence[str | Tokens]) -> str:
    """Return the prompt that these fields name, the checkpoint's default, or "". Raise InputError if it does not exist.

    As in sentence-transformers, token ids get no prompt.
    """
    known, default, prefixes = call.writer.prompt.prompts, call.writer.prompt.default_prompt_name, []
    if default is not None and isinstance(prompts[0], str) and all(name is None for name in names.values()):
        return known[default]
    for field, name in names.items():
        if name is None:
            continue
        synonyms = next((group for group in _PROMPT_SYNONYMS if name in group), ())
        match = next((synonym for synonym in (name, *synonyms) if synonym in known), None)
        if match is None:
            expected = f"one of its prompts: {', '.join(sorted(known))}" if known else "left out, because it has none"
            text = f"this checkpoint has no prompt {name!r}; {field} must be {expected}"
            raise InputError(text, name=field, value=name, expected=tuple(known))
        if not isinstance(prompts[0], str):
            text = f"{field} is {name!r}, but prompts are not put before token ids; send texts, or remove it"
            raise InputError(text, name=field, value=name)
        prefixes.append(known[match])
        if prefixes[0] != prefixes[-1]:
            raise InputError(f"{field} is {name!r}, but another field names another prompt; send one", name=field)
    return prefixes[0] if prefixes else ""


async def _vectors(
    call: Call,
    name: str,
    prompts: list[str] | list[Tokens],
    body: PooledBody,
    *,
    add_special: bool = True,
    prefix: str = "",
) -> list[Floats]:
    status, trees = call.service.backend.status(), []
    # Pairs are tokens that were cut before.
    cut = text_cut(call, body)
    encoded = await call.prepare(
        prompt_inputs.encode_prompts, call, prompts, name, add_special=add_special, cut=cut, prefix=prefix
    )
    for index, tokens in enumerate(encoded):
        tree = RequestTree(call.writer.most_tokens)
        if status.vector == "class scores":
            tree.add_classified(tokens, status.padding_token, f"{name}[{index}]")
        else:
            tree.vector(tree.add(tokens, f"{name}[{index}]"), call.writer.prompt.vector)
        trees.append(tree)
    return [answer.vector(0) for answer in await call.answer_trees(trees)]


def _class_names(call: Call) -> tuple[str, ...]:
    status = call.service.backend.status()
    return status.class_names if status.vector == "class scores" else call.writer.prompt.labels


async def _classes(call: Call, inputs: prompt_inputs.Inputs, body: ClassifyBody | PoolingBody) -> list[list[float]]:
    prompts = await call.prepare(prompt_inputs.parse_prompts, call, inputs, "input")
    activation: ClassActivation | None = "identity" if body.use_activation is False else None
    return await _class_scores(call, "input", prompts, body, activation, add_special=body.add_special_tokens)


async def _class_scores(
    call: Call,
    name: str,
    prompts: list[str] | list[Tokens],
    body: PooledBody,
    activation: ClassActivation | None,
    *,
    add_special: bool = True,
) -> list[list[float]]:
    """Return the scores of all classes for each prompt, by this activation or by the model's own."""
    status, writer = call.service.backend.status(), call.writer
    if status.vector == "class scores":
        vectors = await _vectors(call, name, prompts, body, add_special=add_special)
        return [class_values(scores, activation or status.class_activation) for scores in vectors]
    if not writer.prompt.labels:
        raise InputError(
            "this model has no classification head, and its prompt.json has no labels; ask /v1/decisions, which takes "
            "labels in the request",
            name="model",
        )
    if activation == "sigmoid":
        text = "function_to_apply is 'sigmoid', but this model's classes exclude each other; use softmax or none"
        raise InputError(text, name="parameters.function_to_apply", value="sigmoid", expected=("softmax", "none"))
    if not add_special:
        text = "add_special_tokens is false, but this model inserts texts into its own prompt; remove it"
        raise InputError(text, name="add_special_tokens", value=False, expected=True)
    prompt_inputs.check_answer_size(len(prompts) * len(writer.prompt.labels))
    trees, reads = await call.prepare(_label_trees, call, name, prompts, text_cut(call, body))
    answers = await call.answer_trees(trees)
    label_scores = [read.scores(answer) for read, answer in zip(reads, answers, strict=True)]
    if activation == "identity":
        return [list(map(json_log_probability, scores.log_probabilities)) for scores in label_scores]
    return [list(scores.probabilities) for scores in label_scores]


def _label_trees(
    call: Call, name: str, prompts: list[str] | list[Tokens], cut: TextCut | None
) -> tuple[list[RequestTree], list[LabelReads]]:
    writer = call.writer
    trees, reads = [], []
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            text = f"{name} contains token ids, but this model inserts texts into its own prompt; send texts"
            raise InputError(text, name=name)
        if cut is not None:
            prompt = writer.fit(prompt, cut, f"{name}[{index}]", writer.ask, writer.prompt.labels)
        rendered = writer.ask(prompt, f"{name}[{index}]")
        labels = encode_labels(writer.encoder, rendered, writer.prompt.labels)
        tree = RequestTree(writer.most_tokens)
        reads.append(ask_labels(tree, writer.encode([rendered])[0], labels, f"{name}[{index}]"))
        trees.append(tree)
    return trees, reads


def _normalise(vector: Floats) -> Floats:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector if length == 0 else (vector / length).astype(np.float32)


def _encode_vector(vector: Floats, body: EmbeddingBody | PoolingBody) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]


ROUTES = (
    Route("POST", "/v1/embeddings", embed, (EmbeddingBody,), (EmbeddingReply,)),
    Route("POST", "/embed", embed_plain, (PlainBody,), (list[list[float]],)),
    Route("POST", "/classify", classify, (ClassifyBody,), (ClassifyReply,)),
    Route("POST", "/v1/classify", classify, (ClassifyBody,), (ClassifyReply,)),
    Route("POST", "/pooling", pool, (PoolingBody,), (PoolingReply,)),
    Route("POST", "/predict", predict, (PredictBody,), (list[Prediction], list[list[Prediction]])),
)

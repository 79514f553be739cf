"""The relevance of documents to queries, as one request in which documents share their query.

For a language model, relevance is the share of "yes" among "yes" and "no", behind the checkpoint's `pair_template` or
behind a question of moepass. For a classifier, it is the head's score for the pair, as its tokenizer encodes pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moepass.models.errors import InputError
from moepass.runtime.serving.questions.labels import LabelReads, LabelTokens, ask_labels, encode_labels
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.questions.request_tree import LEAST_LOG_PROBABILITY, RequestTree, TreeAnswer
from moepass.runtime.serving.questions.text_encoding import TextCut
from moepass.runtime.serving.questions.wordings import SYSTEMONE, Option, Question
from moepass.runtime.serving.requests.answer import Floats
from moepass.runtime.serving.requests.backend import ClassActivation

_RELEVANT = Question("predicate", "Is the document relevant to the query?", (Option("true"), Option("false")))


class PairTree:
    """Pairs of query and document, as one request, for the class scores of the model's head or for predicted tokens.

    Class scores skip the token `padding` at the end of a pair.
    Errors contain `names` as the names of the queries and the documents. `instruction` replaces the default of the
    checkpoint's `pair_template`, and `cut` truncates. Raises InputError if a pair is too long, or the model cannot
    compare texts.
    """

    def __init__(
        self,
        writer: PromptWriter,
        pairs: Sequence[tuple[str, str]],
        *,
        by_class_scores: bool,
        padding: int | None = None,
        names: tuple[str, str] = ("query", "documents"),
        instruction: str | None = None,
        cut: TextCut | None = None,
    ) -> None:
        self.tree = RequestTree(writer.most_tokens)
        self._reads: list[LabelReads] = []
        pair_names = [f"{names[1]}[{number}] with its query" for number in range(len(pairs))]
        if by_class_scores:
            encoded = writer.encode_pairs(pairs, names, instruction=instruction, cut=cut)
            self._sequences = [
                self.tree.add_classified(tokens, padding, name)
                for tokens, name in zip(encoded, pair_names, strict=True)
            ]
            return
        prompt = writer.prompt
        has_template = prompt.pair_template is not None
        texts: tuple[str, ...] = prompt.pair_labels if has_template else SYSTEMONE.labels(_RELEVANT)

        def render(query: str, document: str) -> str:
            if has_template:
                return writer.render_pair(query, document, names, instruction)
            return writer.ask(SYSTEMONE.ask(f"Query: {query}\nDocument: {document}", _RELEVANT), names[1])

        if not has_template and prompt.labels and not writer.has_chat_template:
            raise InputError(
                "this model only answers with its own labels and cannot compare two texts, because its prompt.json has "
                "no pair_template; use a reranker or a chat model",
                name="model",
            )
        fitting = writer.fit_documents(pairs, names[1], cut, render, texts)
        rendered = [render(*pair) for pair in fitting]
        if not has_template and writer.needs_blank_before_label(rendered[0]):
            texts = tuple(" " + label for label in texts)
        cache: dict[str, tuple[LabelTokens, ...]] = {}  # most prompts end with the same context
        for prompt_text, tokens, name in zip(rendered, writer.encode(rendered), pair_names, strict=True):
            context = writer.encoder.context_of(prompt_text)
            labels = cache.get(context) or cache.setdefault(context, encode_labels(writer.encoder, prompt_text, texts))
            self._reads.append(ask_labels(self.tree, tokens, labels, name))

    def scores(self, answer: TreeAnswer, *, is_raw: bool = False) -> list[float]:
        """Return the relevance of each pair, from 0 to 1, or its log-odds with `is_raw`.

        Raises CheckpointError if the model's outputs are NaN.
        """
        if self._reads:
            scores = [reads.scores(answer) for reads in self._reads]
            return [_log_odds(*score.log_probabilities) if is_raw else score.probabilities[0] for score in scores]
        return [_relevance(answer.vector(sequence), is_raw) for sequence in self._sequences]


def class_values(scores: Floats | Sequence[float], activation: ClassActivation) -> list[float]:
    """Return the outputs of a classifier for its class scores, as transformers' pipeline does.

    These are probabilities of classes that exclude each other (`softmax`), probabilities of independent classes
    (`sigmoid`), or the scores themselves (`identity`), for regression.
    """
    values = [float(value) for value in scores]
    if activation == "identity":
        return values
    if activation == "sigmoid":
        # The sigmoid is the softmax with a second score of 0.
        return [_softmax([value, 0.0])[0] for value in values]
    return _softmax(values)


def _softmax(values: Sequence[float]) -> list[float]:
    highest = max(values)
    weights = [math.exp(value - highest) for value in values]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _log_odds(relevant: float, irrelevant: float) -> float:
    # A label may have probability 0, and JSON has no infinity.
    return min(max(relevant - irrelevant, LEAST_LOG_PROBABILITY), -LEAST_LOG_PROBABILITY)


def _relevance(scores: Floats, is_raw: bool) -> float:
    if len(scores) > 2:
        problem = f"this model has {len(scores)} classes, but a model that compares texts has 1 or 2; use a reranker"
        raise InputError(problem, name="model", value=len(scores), expected="1 or 2")
    # The softmax of two scores is the sigmoid of their difference.
    log_odds = float(scores[-1]) - (float(scores[0]) if len(scores) == 2 else 0.0)
    return log_odds if is_raw else class_values([log_odds], "sigmoid")[0]

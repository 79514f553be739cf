"""How relevant documents are to queries, as one request in which documents share their query.

By a language model: the share of yes, of yes and no, behind the checkpoint's own `pair_template`, or behind a question
of ours. By a model that classifies: the score that its head gives the pair, encoded as its tokenizer encodes pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moepass.models.errors import InputError
from moepass.runtime.serving.questions.labels import LabelReads, LabelTokens, ask_labels, encode_labels
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.questions.request_tree import RequestTree, TreeAnswer
from moepass.runtime.serving.questions.wordings import SYSTEMONE, Option, Question
from moepass.runtime.serving.requests.answer import Floats

_RELEVANT = Question("predicate", "Is the document relevant to the query?", (Option("true"), Option("false")))


class PairTree:
    """Pairs of query and document, as a request; `scores` are those of its answer."""

    def __init__(
        self,
        writer: PromptWriter,
        pairs: Sequence[tuple[str, str]],
        *,
        by_class_scores: bool,
        names: tuple[str, str] = ("query", "documents"),
    ) -> None:
        """Asks for the head's class scores, or for predictions of tokens. Raises InputError for an impossible pair.

        `names` are what errors call the queries and the documents.
        """
        self.tree = RequestTree(writer.most_tokens)
        self._reads: list[LabelReads] = []
        pair_names = [f"{names[1]}[{number}] with its query" for number in range(len(pairs))]
        if by_class_scores:
            encoded = writer.encode_pairs(pairs, names)
            self._sequences = [self.tree.add(tokens, name) for tokens, name in zip(encoded, pair_names, strict=True)]
            for sequence in self._sequences:
                self.tree.vector(sequence, "last")
            return
        prompt = writer.prompt
        if prompt.pair_template is not None:
            rendered = [prompt.render_pair(*map(writer.plain, pair, names)) for pair in pairs]
            texts: tuple[str, ...] = prompt.pair_labels
        elif prompt.labels and not writer.has_chat_template:
            raise InputError(
                "this model answers with its own labels alone, and its prompt.json names no pair_template, so that it "
                "cannot compare two texts",
                name="model",
            )
        else:
            asked = [SYSTEMONE.ask(f"Query: {query}\nDocument: {document}", _RELEVANT) for query, document in pairs]
            rendered = [writer.ask(text, name) for text, name in zip(asked, pair_names, strict=True)]
            blank = " " if writer.asks_before_blank(rendered[0]) else ""
            texts = tuple(blank + label for label in SYSTEMONE.labels(_RELEVANT))
        known: dict[str, tuple[LabelTokens, ...]] = {}  # most prompts end alike
        for prompt_text, tokens, name in zip(rendered, writer.encode(rendered), pair_names, strict=True):
            context = writer.encoder.context_of(prompt_text)
            labels = known.get(context) or known.setdefault(context, encode_labels(writer.encoder, prompt_text, texts))
            self._reads.append(ask_labels(self.tree, tokens, labels, name))

    def scores(self, answer: TreeAnswer) -> list[float]:
        """For each pair, from 0 to 1. Raises CheckpointError where the model gives no numbers."""
        if self._reads:
            return [reads.scores(answer).probabilities[0] for reads in self._reads]
        return [_relevance(answer.vector(sequence)) for sequence in self._sequences]


def class_probabilities(scores: Floats) -> list[float]:
    """Of each class: their softmax; of a single one, as reward models have it, the sigmoid."""
    values = [float(value) for value in scores]
    if len(values) == 1:
        return [_sigmoid(values[0])]
    highest = max(values)
    weights = [math.exp(value - highest) for value in values]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _relevance(scores: Floats) -> float:
    if len(scores) > 2:
        raise InputError(
            f"this model tells {len(scores)} classes apart; one that compares texts has 1 or 2",
            name="model",
            value=len(scores),
            expected="1 or 2",
        )
    return class_probabilities(scores)[-1]


def _sigmoid(value: float) -> float:
    # Without overflow on either side.
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))

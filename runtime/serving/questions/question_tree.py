"""Conversion of questions about one input to one request, and of the answer to the probabilities of the options.

Pseudo-code
    each question is a prompt: the input, then the question; so all prompts share the input
    ask the question in several orders of its options, if that is wanted
    encode all prompts together, and ask for the labels of their options
    the probability of an option is the mean over the orders; the spread is the largest difference between two of them
If a checkpoint's `prompt.json` lists labels, and there is no chat template, the model can answer only with these
labels. The prompt is then the input alone, and every question must be a choice among the labels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from moepass.models.errors import InputError
from moepass.models.limits import MOST_CHOICES
from moepass.runtime.serving.questions.labels import (
    ImpossibleLabelsError,
    LabelReads,
    LabelTokens,
    ask_labels,
    encode_labels,
)
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.questions.request_tree import RequestTree, TreeAnswer
from moepass.runtime.serving.questions.wordings import Option, Question, QuestionKind, Wording
from moepass.runtime.serving.requests.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """The probability of each option of a question; they sum to 1.

    Attributes:
        mass: The total probability of all labels of the question.
        orders: The number of orders of the options in which the question was asked.
        spread: The largest difference of an option's probability between two orders.
        refusal: The reason if the model cannot answer the question; then `probabilities` is empty.
    """

    probabilities: tuple[float, ...] = ()
    mass: float = 0.0
    orders: int = 1
    spread: float = 0.0
    refusal: str | None = None

    @property
    def best(self) -> int:
        """The index of the most likely option, the first if several are equal."""
        return self.probabilities.index(max(self.probabilities))


# An order of a question's options, as their indices, and the reads of their labels in this order.
_Asked = tuple[tuple[int, ...], LabelReads]


class QuestionTree:
    """Questions about one input, as one request.

    Each question is asked in up to `orders` orders of its options, and the answer is the mean. With `order_invariant`,
    the orders do not depend on the order in which the options come. Errors call the input `text_name`, and the
    questions `names`. Raises InputError if a prompt is too long, or the labels of a question cannot be distinguished.
    """

    def __init__(
        self,
        writer: PromptWriter,
        text: str,
        questions: Sequence[Question],
        wording: Wording,
        *,
        orders: int = 1,
        order_invariant: bool = False,
        text_name: str = "input",
        names: Sequence[str] = (),
    ) -> None:
        self.tree = RequestTree(writer.most_tokens)
        # Each question in one or more orders, or the reason why the model cannot answer it.
        self._questions: list[list[_Asked] | str] = []
        names = names or [f"question {number}" for number in range(len(questions))]
        if writer.prompt.labels and not writer.has_chat_template:
            self._ask_own_labels(writer, text, questions, text_name)
            return
        planned = []
        for number, question in enumerate(questions):
            for order in _orders(question, orders, order_invariant=order_invariant):
                ordered = dataclasses.replace(question, options=tuple(question.options[index] for index in order))
                planned.append((number, order, ordered, writer.ask(wording.ask(text, ordered), names[number])))
        encoded = writer.encode([rendered for *_, rendered in planned])
        collected: list[list[_Asked]] = [[] for _ in questions]
        cache: dict[tuple[str, ...], tuple[LabelTokens, ...]] = {}  # most questions have the same labels
        for (number, order, ordered, rendered), tokens in zip(planned, encoded, strict=True):
            blank = " " if writer.needs_blank_before_label(rendered) else ""
            texts = [blank + label for label in wording.labels(ordered)]
            key = (writer.encoder.context_of(rendered), *texts)
            labels = cache.get(key) or cache.setdefault(key, encode_labels(writer.encoder, rendered, texts))
            collected[number].append((order, ask_labels(self.tree, tokens, labels, names[number])))
        self._questions += collected

    def request(self, request_id: str, salt: bytes = b"") -> Request | None:
        """Return the request, or None if the model can answer none of the questions."""
        if all(isinstance(question, str) for question in self._questions):
            return None
        return self.tree.request(request_id, salt)

    def answers(self, answer: TreeAnswer | None) -> list[QuestionAnswer]:
        """Return the answer to each question. `answer` is None if `request` returned None."""
        return [_mean_over_orders(question, answer) for question in self._questions]

    def _ask_own_labels(self, writer: PromptWriter, text: str, questions: Sequence[Question], name: str) -> None:
        labels, labels_by_name = writer.prompt.labels, writer.labels_by_name
        rendered = writer.ask(text, name)
        (tokens,) = writer.encode([rendered])
        for question in questions:
            unknown = [option.name for option in question.options if option.name not in labels_by_name]
            if question.kind == "choice" and not unknown:
                chosen = [labels_by_name[option.name] for option in question.options]
                reads = ask_labels(self.tree, tokens, encode_labels(writer.encoder, rendered, chosen), name)
                self._questions.append([(tuple(range(len(chosen))), reads)])
                continue
            problem = f"it cannot answer a question of type {question.kind}"
            if question.kind == "choice":
                problem = f"{unknown[0]!r} is not one of them"
            self._questions.append(
                f"this model only answers with its own {len(labels)} labels ({', '.join(labels[:3])}, …), and "
                f"{problem}; ask for a choice among its labels"
            )


def _orders(question: Question, most: int, *, order_invariant: bool) -> list[tuple[int, ...]]:
    """Return up to `most` orders of the options: evenly spaced rotations, each of which starts with another option.

    The first order is the question's own, or that of the sorted options with `order_invariant`. Levels of a score have
    an inherent order, so they are asked forwards and backwards. A predicate has one order.
    """
    count = len(question.options)
    indices = list(range(count))
    if question.kind == "predicate":
        return [tuple(indices)]
    if question.kind == "score":
        return [tuple(indices), tuple(reversed(indices))][:most]
    if order_invariant:
        indices.sort(key=lambda index: dataclasses.astuple(question.options[index]))
    rotations = min(count, most)
    starts = [count * number // rotations for number in range(rotations)]
    return [tuple(indices[start:] + indices[:start]) for start in starts]


def _mean_over_orders(asked: Sequence[_Asked] | str, answer: TreeAnswer | None) -> QuestionAnswer:
    if isinstance(asked, str) or answer is None:
        return QuestionAnswer(refusal=str(asked))
    mass = 0.0
    by_option: list[list[float]] = [[] for _ in asked[0][0]]
    for order, reads in asked:
        try:
            scores = reads.scores(answer)
        except ImpossibleLabelsError as error:  # the other questions may still have answers
            return QuestionAnswer(refusal=str(error))
        mass += scores.mass
        for option, probability in zip(order, scores.probabilities, strict=True):
            by_option[option].append(probability)
    means = tuple(sum(values) / len(asked) for values in by_option)
    spread = max(max(values) - min(values) for values in by_option)
    return QuestionAnswer(means, mass / len(asked), len(asked), spread)


def checked_question(kind: QuestionKind, text: str, options: Sequence[Option], name: str, option_noun: str) -> Question:
    """Return a question. Raise InputError, with `name` and `option_noun`, unless it has 2 to MOST_CHOICES options."""
    if not 2 <= len(options) <= MOST_CHOICES:
        problem = f"{name} has {len(options)} {option_noun}; a question takes 2 to {MOST_CHOICES}"
        raise InputError(problem, name=name, value=len(options), expected=range(2, MOST_CHOICES + 1))
    return Question(kind, text, tuple(options))


def expected_level(probabilities: tuple[float, ...]) -> float:
    """Return the mean level; levels are numbered from 0."""
    return math.fsum(level * probability for level, probability in enumerate(probabilities))


def confidence(kind: Literal["choice", "score"], probabilities: tuple[float, ...]) -> float:
    """Return a confidence from 0 (all options equally likely) to 1 (one option is certain).

    It is defined as in transformers' decision pipeline. For a choice: how far the best option is above chance. For a
    score: the mean distance of the levels to the best one, relative to the distance for equally likely levels.
    """
    count = len(probabilities)
    if count == 1:
        return 1.0
    best = probabilities.index(max(probabilities))
    if kind == "choice":
        return max(0.0, (probabilities[best] - 1 / count) / (1 - 1 / count))
    distance = math.fsum(probability * abs(level - best) for level, probability in enumerate(probabilities))
    uniform = math.fsum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - distance / uniform)

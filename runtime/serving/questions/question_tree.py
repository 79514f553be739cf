"""Questions about one input become one request, and its answer the probabilities of their options.

Pseudo-code
    each question is a prompt: the input, then the question; so all of them share the input
    where the order of the options must not matter, a question is asked in several orders
    prompts are encoded together, and the labels of their options asked behind them
    an option's probability is the mean over the orders
A checkpoint whose `prompt.json` names labels answers with these alone: there the input is the whole prompt, and a
question is the choice among them that its options name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moepass.models.errors import InputError
from moepass.models.limits import MOST_CHOICES, MOST_ORDERS
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
    """The probabilities of a question's options, in their order, and the mass on all of its labels together.

    `refusal` says why there are none, where the model cannot answer the question; then the others are empty.
    """

    probabilities: tuple[float, ...] = ()
    mass: float = 0.0
    refusal: str | None = None

    @property
    def best(self) -> int:
        """The most likely option, the first of equal ones."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """A question in several orders: for each, the options in their order, and where their labels are read."""

    orders: tuple[tuple[int, ...], ...]
    reads: tuple[LabelReads, ...]


class QuestionTree:
    """Questions about one input, as a request."""

    def __init__(
        self,
        writer: PromptWriter,
        text: str,
        questions: Sequence[Question],
        wording: Wording,
        *,
        order_invariant: bool = False,
        text_name: str = "input",
        names: Sequence[str] = (),
    ) -> None:
        """Raises InputError, which names the question, where its prompt does not fit or its labels cannot be told.

        `text_name` and `names` are what errors call the input and the questions.
        """
        self.tree = RequestTree(writer.most_tokens)
        self._asked: list[_Asked | str] = []
        names = names or [f"question {number}" for number in range(len(questions))]
        if writer.prompt.labels and not writer.has_chat_template:
            self._ask_own_labels(writer, text, questions, text_name)
            return
        planned = []
        for number, question in enumerate(questions):
            for order in _orders(question) if order_invariant else [tuple(range(len(question.options)))]:
                asked = dataclasses.replace(question, options=tuple(question.options[place] for place in order))
                planned.append((number, order, asked, writer.ask(wording.ask(text, asked), names[number])))
        encoded = writer.encode([rendered for *_, rendered in planned])
        collected: list[list[tuple[tuple[int, ...], LabelReads]]] = [[] for _ in questions]
        known: dict[tuple[str, ...], tuple[LabelTokens, ...]] = {}  # most questions have the same labels
        for (number, order, asked, rendered), tokens in zip(planned, encoded, strict=True):
            blank = " " if writer.asks_before_blank(rendered) else ""
            texts = [blank + label for label in wording.labels(asked)]
            key = (writer.encoder.context_of(rendered), *texts)
            labels = known.get(key) or known.setdefault(key, encode_labels(writer.encoder, rendered, texts))
            collected[number].append((order, ask_labels(self.tree, tokens, labels, names[number])))
        self._asked = [
            _Asked(tuple(order for order, _ in found), tuple(reads for _, reads in found)) for found in collected
        ]

    def request(self, request_id: str, salt: bytes = b"") -> Request | None:
        """None where no question can be answered by this model."""
        if all(isinstance(asked, str) for asked in self._asked):
            return None
        return self.tree.request(request_id, salt)

    def answers(self, answer: TreeAnswer | None) -> list[QuestionAnswer]:
        """The answer to each question; `answer` is that to the request, None where there was none."""
        found = []
        for asked in self._asked:
            if isinstance(asked, str) or answer is None:
                found.append(QuestionAnswer(refusal=str(asked)))
                continue
            try:
                found.append(_mean(asked, answer))
            except ImpossibleLabelsError as error:  # of this question alone: others may have answers
                found.append(QuestionAnswer(refusal=str(error)))
        return found

    def _ask_own_labels(self, writer: PromptWriter, text: str, questions: Sequence[Question], name: str) -> None:
        labels = writer.prompt.labels
        called = writer.called_labels
        rendered = writer.ask(text, name)
        (tokens,) = writer.encode([rendered])
        for question in questions:
            chosen = [called.get(option.name) for option in question.options]
            known = [label for label in chosen if label is not None]
            if question.kind != "choice" or len(known) < len(chosen):
                unknown = [option.name for option, label in zip(question.options, chosen, strict=True) if label is None]
                self._asked.append(
                    f"this model answers with its own labels alone ({', '.join(labels[:3])}, … {len(labels)} in all); "
                    + (f"{unknown[0]!r} is none of them" if question.kind == "choice" else "ask for a choice of them")
                )
                continue
            encoded = encode_labels(writer.encoder, rendered, known)
            reads = ask_labels(self.tree, tokens, encoded, name)
            self._asked.append(_Asked((tuple(range(len(known))),), (reads,)))


def _orders(question: Question) -> list[tuple[int, ...]]:
    """Orders that do not depend on that of the options: those of the sorted options, each of which begins once.

    Levels of a score have an order of their own, which may be turned around.
    """
    count = len(question.options)
    if question.kind == "predicate":
        return [(0, 1)]
    if question.kind == "score":
        return [tuple(range(count)), tuple(reversed(range(count)))]
    sorted_options = sorted(range(count), key=lambda place: dataclasses.astuple(question.options[place]))
    starts = [count * turn // min(count, MOST_ORDERS) for turn in range(min(count, MOST_ORDERS))]
    return [tuple(sorted_options[start:] + sorted_options[:start]) for start in starts]


def _mean(asked: _Asked, answer: TreeAnswer) -> QuestionAnswer:
    sums, mass = [0.0] * len(asked.orders[0]), 0.0
    for order, reads in zip(asked.orders, asked.reads, strict=True):
        scores = reads.scores(answer)
        mass += scores.mass
        for place, probability in zip(order, scores.probabilities, strict=True):
            sums[place] += probability
    count = len(asked.orders)
    return QuestionAnswer(tuple(value / count for value in sums), mass / count)


def checked_question(kind: QuestionKind, text: str, options: Sequence[Option], name: str, option_noun: str) -> Question:
    """Return a question with these options.

    Raises:
        InputError: The number of options is not between 2 and MOST_CHOICES. The message uses `name` for the question
            and `option_noun` for its options.
    """
    if not 2 <= len(options) <= MOST_CHOICES:
        raise InputError(
            f"{name} has {len(options)} {option_noun}; a question takes 2 to {MOST_CHOICES}",
            name=name,
            value=len(options),
            expected=range(2, MOST_CHOICES + 1),
        )
    return Question(kind, text, tuple(options))

"""The words in which questions are put to a model. Each wording is that of another server, whose scores it gives.

A question is a text, and options; each option has a label, which the model answers with. Labels of one question have
equal widths where they are many, so that none begins with another.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Sequence
from typing import Literal

QuestionKind = Literal["predicate", "choice", "score"]


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One possible answer. Levels of a score have no name but a description."""

    name: str
    description: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question about an input. A predicate has the options true and false, or yes and no, in this order."""

    kind: QuestionKind
    text: str
    options: tuple[Option, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Wording:
    """`labels` of a question's options, and the `lines` that ask it below an input."""

    labels: Callable[[Question], tuple[str, ...]]
    lines: Callable[[Question, Sequence[str]], list[str]]

    def ask(self, text: str, question: Question) -> str:
        return "\n".join([text, "", *self.lines(question, self.labels(question))])


def _letters_or_numbers(question: Question) -> tuple[str, ...]:
    count = len(question.options)
    if question.kind == "predicate":
        return ("Yes", "No")
    return tuple(string.ascii_uppercase[:count]) if count <= 26 else _numbers(1, count)


def _systemone_lines(question: Question, labels: Sequence[str]) -> list[str]:
    lines = [question.text] if question.text else []
    for label, option in zip(labels, question.options, strict=True):
        if question.kind == "predicate":
            lines += [f"{label}: {option.description}"] if option.description else []
        elif question.kind == "choice":
            lines.append(f"{label}. {option.name}" + (f": {option.description}" if option.description else ""))
        else:
            lines.append(f"{label}. {option.description}")
    if question.kind == "predicate":
        return [*lines, "Answer Yes or No only."]
    what = "letter" if labels[0] == "A" else "number"
    of = "option" if question.kind == "choice" else "level"
    return [*lines, f"Answer with the {what} of the {of} that fits best ({labels[0]} to {labels[-1]}) only."]


def _letters_or_levels(question: Question) -> tuple[str, ...]:
    if question.kind == "predicate":
        return ("yes", "no")
    if question.kind == "choice":
        return _letters_or_numbers(question)
    return _numbers(0, len(question.options))


def _sglang_lines(question: Question, labels: Sequence[str]) -> list[str]:
    lines = [f"Question: {question.text}"] if question.text else []
    pairs = zip(labels, question.options, strict=True)
    if question.kind == "choice":
        lines += [
            f"{label}: {option.name}" + (f" - {option.description}" if option.description else "")
            for label, option in pairs
        ]
        return [*lines, f"Answer with the {'letter' if labels[0] == 'A' else 'number'} of one option only."]
    if question.kind == "score":
        lines += [f"{label}: {option.description}" for label, option in pairs]
        return [*lines, "Answer with the number of one level only."]
    lines = ["Is the following true?" + (f" {question.text}" if question.text else "")]
    lines += [f"{label}: {option.description}" for label, option in pairs if option.description]
    return [*lines, "Answer with yes or no only."]


def _numbers(first: int, count: int) -> tuple[str, ...]:
    width = len(str(first + count - 1))
    return tuple(f"{number:0{width}}" for number in range(first, first + count))


# That of transformers' decision pipeline and its /v1/systemone, for which it needs no more than 26 options.
SYSTEMONE = Wording(_letters_or_numbers, _systemone_lines)
# That of SGLang's /v1/decisions, version 1.
SGLANG = Wording(_letters_or_levels, _sglang_lines)
SGLANG_VERSION = 1

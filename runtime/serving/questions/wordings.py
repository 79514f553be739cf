"""Wordings of questions. Each is copied from another server, so that its scores are reproduced.

A question is a text with options. Each option has a label, with which the model answers. Labels that are numbers have
equal widths, so that no label is a prefix of another.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Sequence
from typing import Literal

QuestionKind = Literal["predicate", "choice", "score"]


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A possible answer. A level of a score is only described, its name is not shown to the model."""

    name: str
    description: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question about an input. The options of a predicate are true and false, or yes and no, in this order."""

    kind: QuestionKind
    text: str
    options: tuple[Option, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Wording:
    """A way to phrase questions: functions that return the labels of the options, and the lines that ask with these."""

    labels: Callable[[Question], tuple[str, ...]]
    lines: Callable[[Question, Sequence[str]], list[str]]

    def ask(self, text: str, question: Question) -> str:
        """Return the text of the input, a blank line, and the question."""
        return "\n".join([text, "", *self.lines(question, self.labels(question))])


def _letters_or_numbers(question: Question) -> tuple[str, ...]:
    count = len(question.options)
    if question.kind == "predicate":
        return ("Yes", "No")
    return tuple(string.ascii_uppercase[:count]) if count <= 26 else _numbers(1, count)


def _option_lines(question: Question, labels: Sequence[str], behind_label: str, behind_name: str) -> list[str]:
    lines = []
    for label, option in zip(labels, question.options, strict=True):
        if question.kind == "choice":
            description = behind_name + option.description if option.description else ""
            lines.append(f"{label}{behind_label} {option.name}{description}")
        elif question.kind == "score":
            lines.append(f"{label}{behind_label} {option.description}")
        elif option.description:
            lines.append(f"{label}: {option.description}")
    return lines


def _systemone_lines(question: Question, labels: Sequence[str]) -> list[str]:
    lines = _option_lines(question, labels, ".", ": ")
    if question.text:
        lines = [question.text, *lines]
    if question.kind == "predicate":
        return [*lines, "Answer Yes or No only."]
    label_noun = "letter" if labels[0] == "A" else "number"
    option_noun = "option" if question.kind == "choice" else "level"
    answers = f"{labels[0]} to {labels[-1]}"
    return [*lines, f"Answer with the {label_noun} of the {option_noun} that fits best ({answers}) only."]


def _letters_or_levels(question: Question) -> tuple[str, ...]:
    if question.kind == "predicate":
        return ("yes", "no")
    if question.kind == "choice":
        return _letters_or_numbers(question)
    return _numbers(0, len(question.options))


def _sglang_lines(question: Question, labels: Sequence[str]) -> list[str]:
    lines = _option_lines(question, labels, ":", " - ")
    if question.kind == "predicate":
        asked = "Is the following true?" + (f" {question.text}" if question.text else "")
        return [asked, *lines, "Answer with yes or no only."]
    if question.text:
        lines = [f"Question: {question.text}", *lines]
    label_noun = "letter" if labels[0] == "A" else "number"
    option_noun = "option" if question.kind == "choice" else "level"
    return [*lines, f"Answer with the {label_noun} of one {option_noun} only."]


def _numbers(first: int, count: int) -> tuple[str, ...]:
    width = len(str(first + count - 1))
    return tuple(f"{number:0{width}}" for number in range(first, first + count))


# The wording of transformers' decision pipeline and its /v1/systemone, which support at most 26 options.
SYSTEMONE = Wording(_letters_or_numbers, _systemone_lines)
# The wording of SGLang's /v1/decisions, version 1.
SGLANG = Wording(_letters_or_levels, _sglang_lines)
SGLANG_VERSION = 1

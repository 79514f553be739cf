"""Candidate answers as tokens, and their scores: the exact log-probability of each, whatever its number of tokens.

A label of several tokens is scored by teacher forcing: it is a sequence behind the prompt, without its last token, and
its prediction is read at each place. Labels compete by softmax over their log-probabilities.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moepass.models.errors import CheckpointError, InputError
from moepass.models.limits import MOST_LABELS, check_limit
from moepass.runtime.serving.questions.request_tree import RequestTree, TreeAnswer
from moepass.runtime.serving.questions.text_encoding import TextEncoder
from moepass.runtime.serving.requests.request import Tokens

LabelTokens = tuple[int, ...]

IMPOSSIBLE = (
    "the model gives all labels the probability 0, so that they cannot be compared; give labels that it can say"
)


class ImpossibleLabelsError(CheckpointError):
    """The model gives all labels the probability 0, so that they cannot be compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class LabelScores:
    """Scores of labels in their order.

    `probabilities` compete among the labels and sum to 1. `mass` is what the model gives to all labels together, of
    everything that it could have said; a label that begins with another label is part of that one and counts once.
    """

    log_probabilities: tuple[float, ...]
    probabilities: tuple[float, ...]
    mass: float


def encode_labels(encoder: TextEncoder, prompt: str, labels: Sequence[str]) -> tuple[LabelTokens, ...]:
    """The tokens that each of `labels` adds to the rendered `prompt`; its own, where it would change the prompt's.

    Labels are rendered text like prompts: what a user wrote in them has been shielded. Raises InputError where there
    are none or too many, one adds no tokens, and two add the same.
    """
    found: dict[LabelTokens, str] = {}
    for label, (tokens, _) in zip(labels, _in_context(encoder, prompt, labels), strict=True):
        if not tokens:
            raise InputError(
                f"label {_short(label)} tokenises to nothing; a label needs at least one token",
                name="label",
                value=label,
            )
        if tokens in found:
            raise InputError(
                f"label {_short(label)} is given twice"
                if found[tokens] == label
                else f"labels {_short(found[tokens])} and {_short(label)} are the same tokens; the model cannot tell "
                "them apart",
                name="label",
                value=label,
            )
        found[tokens] = label
    return tuple(found)


def label_warnings(encoder: TextEncoder, prompt: str, labels: Sequence[str]) -> list[str]:
    """A sentence for each of `labels` that the model has hardly seen as it is behind `prompt`, with its tokens.

    Most vocabularies hold words with the blank before them. So a label that takes fewer tokens with one is seldom what
    was meant, nor one that joins the word before it.
    """
    found = []
    with_blanks = _in_context(encoder, prompt, [" " + label for label in labels])
    for label, (own, is_apart), (blank, _) in zip(
        labels, _in_context(encoder, prompt, labels), with_blanks, strict=True
    ):
        if not is_apart:
            what = "joins the text before it, where no token ends"
        elif len(blank) < len(own):
            what = f"is the tokens {encoder.names(own)} behind this prompt"
        else:
            continue
        found.append(
            f"label {_short(label)} {what}; with a blank before it, it is {encoder.names(blank)}. Which one was the "
            "model trained with?"
        )
    return found


def _in_context(encoder: TextEncoder, prompt: str, labels: Sequence[str]) -> list[tuple[LabelTokens, bool]]:
    """Of each label its tokens behind `prompt`, and whether the prompt's own stay what they are."""
    if not labels:
        raise InputError("no labels are given; name at least one candidate answer", name="labels", expected="1 or more")
    check_limit("the number of labels", len(labels), MOST_LABELS, "compare them in several requests")
    context = encoder.context_of(prompt)
    before, *wholes = encoder.encode_all([context, *(context + label for label in labels)])
    found = []
    for label, whole in zip(labels, wholes, strict=True):
        is_apart = whole[: len(before)].tolist() == before.tolist()
        tokens = whole[len(before) :] if is_apart else encoder.encode(label)
        found.append((tuple(tokens.tolist()), is_apart))
    return found


def ask_labels(tree: RequestTree, prompt: Tokens, labels: Sequence[LabelTokens], name: str) -> LabelReads:
    """Ask for all of `labels` behind the `prompt`. Raises InputError, which names `name`, where one does not fit."""
    here = tree.add(prompt, name)
    last = len(prompt) - 1
    tree.read(here, last, [label[0] for label in labels])
    # Labels that begin alike are read behind the same tokens.
    stems: dict[LabelTokens, int] = {(): here}
    for label in labels:
        stem = label[:-1]
        if stem not in stems:
            stems[stem] = tree.add(np.concatenate((prompt, np.array(stem, np.int32))), f"{name} with its longest label")
        for place, token in enumerate(label[1:], 1):
            tree.read(stems[stem], last + place, [token])
    return LabelReads(tuple(labels), last, tuple(stems[label[:-1]] for label in labels))


@dataclasses.dataclass(frozen=True, slots=True)
class LabelReads:
    """Where labels were asked for: each behind place `first` of a sequence of its own, which the shorter share."""

    labels: tuple[LabelTokens, ...]
    first: int
    sequences: tuple[int, ...]

    def scores(self, answer: TreeAnswer) -> LabelScores:
        """Raises CheckpointError where the model gives no probabilities, ImpossibleLabelsError where all are 0."""
        begun = answer.log_probabilities(self.sequences[0], self.first, [label[0] for label in self.labels])
        sums = [
            math.fsum(
                [first]
                + [
                    answer.log_probabilities(sequence, self.first + place, [token])[0]
                    for place, token in enumerate(label[1:], 1)
                ]
            )
            for first, label, sequence in zip(begun, self.labels, self.sequences, strict=True)
        ]
        return score_labels(self.labels, sums)


def score_labels(labels: Sequence[LabelTokens], log_probabilities: Sequence[float]) -> LabelScores:
    """The scores of labels, given what each of them has got. Raises ImpossibleLabelsError."""
    table = score_label_rows(labels, np.array([log_probabilities], np.float64))
    if not table.is_possible[0]:
        raise ImpossibleLabelsError(IMPOSSIBLE, name="labels")
    return LabelScores(tuple(log_probabilities), tuple(table.probabilities[0].tolist()), float(table.mass[0]))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LabelTable:
    """Scores of the same labels for several prompts: as in `LabelScores`, a row for each.

    probabilities   [rows, labels]; of no meaning where a row
    is_possible     [rows] is False: there the model gives all labels the probability 0
    mass            [rows]
    """

    probabilities: npt.NDArray[np.float64]
    is_possible: npt.NDArray[np.bool_]
    mass: npt.NDArray[np.float64]


def score_label_rows(labels: Sequence[LabelTokens], log_probabilities: npt.NDArray[np.float64]) -> LabelTable:
    """The scores of `labels`, given what each of them has got [rows, labels] behind each prompt."""
    highest = log_probabilities.max(axis=1, keepdims=True)
    # One label may be impossible, but not all of them.
    is_possible = np.isfinite(highest[:, 0])
    weights = np.exp(log_probabilities - np.where(np.isfinite(highest), highest, 0.0))
    totals = weights.sum(axis=1, keepdims=True)
    known = set(labels)
    is_own = [not any(label[:length] in known for length in range(1, len(label))) for label in labels]
    mass = np.exp(log_probabilities[:, is_own]).sum(axis=1)
    probabilities = weights / np.where(totals > 0, totals, 1.0)
    return LabelTable(probabilities, is_possible, np.minimum(mass, 1.0))


def _short(label: str) -> str:
    return repr(label if len(label) <= 40 else label[:40] + "…")

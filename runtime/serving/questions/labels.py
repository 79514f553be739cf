"""Candidate answers as tokens, and the exact log-probability of each, for labels of any number of tokens.

A label of several tokens is scored by teacher forcing: the label without its last token is appended to the prompt, and
the prediction of each token is read. Labels compete by softmax over their log-probabilities.
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

IMPOSSIBLE = "the model assigns probability 0 to all labels, so they cannot be compared; use labels that are likelier"


class ImpossibleLabelsError(CheckpointError):
    """The model assigns probability 0 to all labels, so that they cannot be compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class LabelScores:
    """The log-probabilities of labels, their softmax, and the probability of all labels together (`mass`).

    If a label starts with another label, the mass counts only the shorter one, which includes it.
    """

    log_probabilities: tuple[float, ...]
    probabilities: tuple[float, ...]
    mass: float


def encode_labels(encoder: TextEncoder, prompt: str, labels: Sequence[str]) -> tuple[LabelTokens, ...]:
    """Return the tokens that each label adds to the rendered `prompt`.

    If a label changes the prompt's last token, its own encoding is used instead. Labels must be shielded like prompts.
    Raises InputError for no labels or too many, a label without tokens, and labels with the same tokens.
    """
    labels_by_tokens: dict[LabelTokens, str] = {}
    for label, (tokens, _) in zip(labels, _in_context(encoder, prompt, labels), strict=True):
        if not tokens:
            text = f"label {_short(label)} has no tokens; a label needs at least one token"
            raise InputError(text, name="label", value=label)
        if tokens in labels_by_tokens:
            first = labels_by_tokens[tokens]
            raise InputError(
                f"label {_short(label)} occurs twice; labels must be unique"
                if first == label
                else f"labels {_short(first)} and {_short(label)} have the same tokens, so the model cannot "
                "distinguish them; change one of them",
                name="label",
                value=label,
            )
        labels_by_tokens[tokens] = label
    return tuple(labels_by_tokens)


def label_warnings(encoder: TextEncoder, prompt: str, labels: Sequence[str]) -> list[str]:
    """Return a warning for each label whose form behind `prompt` is probably not the intended one.

    Most vocabularies contain words with a leading space. So a label is suspicious if it needs fewer tokens with a
    leading space, or if it merges with the last token of the prompt.
    """
    warnings = []
    with_blanks = _in_context(encoder, prompt, [" " + label for label in labels])
    for label, (tokens, keeps_prompt), (blank_tokens, _) in zip(
        labels, _in_context(encoder, prompt, labels), with_blanks, strict=True
    ):
        if not keeps_prompt:
            problem = "changes the last token of the prompt"
        elif len(blank_tokens) < len(tokens):
            problem = f"has the tokens {encoder.names(tokens)} behind this prompt"
        else:
            continue
        warnings.append(
            f"label {_short(label)} {problem}; with a leading space it has {encoder.names(blank_tokens)}. Use the form "
            "that the model was trained with."
        )
    return warnings


def _in_context(encoder: TextEncoder, prompt: str, labels: Sequence[str]) -> list[tuple[LabelTokens, bool]]:
    """Return the tokens of each label behind `prompt`, and whether the prompt's own tokens stay the same."""
    if not labels:
        raise InputError("there are no labels; pass at least one candidate answer", name="labels", expected="1 or more")
    check_limit("the number of labels", len(labels), MOST_LABELS, "compare them in several requests")
    context = encoder.context_of(prompt)
    before, *joined = encoder.encode_all([context, *(context + label for label in labels)])
    encoded = []
    for label, sequence in zip(labels, joined, strict=True):
        keeps_prompt = sequence[: len(before)].tolist() == before.tolist()
        tokens = sequence[len(before) :] if keeps_prompt else encoder.encode(label)
        encoded.append((tuple(tokens.tolist()), keeps_prompt))
    return encoded


def ask_labels(tree: RequestTree, prompt: Tokens, labels: Sequence[LabelTokens], name: str) -> LabelReads:
    """Add reads for all `labels` behind `prompt` to `tree`. Raise InputError if a sequence is too long."""
    sequence = tree.add(prompt, name)
    last = len(prompt) - 1
    tree.read(sequence, last, [label[0] for label in labels])
    # Labels with a common stem, all tokens but the last, are read from one sequence.
    stems: dict[LabelTokens, int] = {(): sequence}
    for label in labels:
        stem = label[:-1]
        if stem not in stems:
            stems[stem] = tree.add(np.concatenate((prompt, np.array(stem, np.int32))), f"{name} with its longest label")
        for offset, token in enumerate(label[1:], 1):
            tree.read(stems[stem], last + offset, [token])
    return LabelReads(tuple(labels), last, tuple(stems[label[:-1]] for label in labels))


@dataclasses.dataclass(frozen=True, slots=True)
class LabelReads:
    """The positions in a `RequestTree` from which labels are read.

    Token `first`, the last one of the prompt, predicts the first token of each label. `sequences` are, for each label,
    the prompt and the label without its last token.
    """

    labels: tuple[LabelTokens, ...]
    first: int
    sequences: tuple[int, ...]

    def scores(self, answer: TreeAnswer) -> LabelScores:
        """Return the scores of the labels. Raise CheckpointError for NaN, ImpossibleLabelsError if all are -inf."""
        firsts = answer.log_probabilities(self.sequences[0], self.first, [label[0] for label in self.labels])
        sums = []
        for first, label, sequence in zip(firsts, self.labels, self.sequences, strict=True):
            later = [
                answer.log_probabilities(sequence, self.first + offset, [token])[0]
                for offset, token in enumerate(label[1:], 1)
            ]
            sums.append(math.fsum([first, *later]))
        return score_labels(self.labels, sums)


def score_labels(labels: Sequence[LabelTokens], log_probabilities: Sequence[float]) -> LabelScores:
    """Return the scores of labels from their log-probabilities. Raise ImpossibleLabelsError if all are -inf."""
    table = score_label_rows(labels, np.array([log_probabilities], np.float64))
    if not table.is_possible[0]:
        raise ImpossibleLabelsError(IMPOSSIBLE, name="labels")
    return LabelScores(tuple(log_probabilities), tuple(table.probabilities[0].tolist()), float(table.mass[0]))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LabelTable:
    """The probabilities [rows, labels] and the mass [rows] of the same labels for several prompts, as in `LabelScores`.

    `is_possible` [rows] is False if all labels of the row have probability 0; ignore the row's values then.
    """

    probabilities: npt.NDArray[np.float64]
    is_possible: npt.NDArray[np.bool_]
    mass: npt.NDArray[np.float64]


def score_label_rows(labels: Sequence[LabelTokens], log_probabilities: npt.NDArray[np.float64]) -> LabelTable:
    """Return the scores of `labels` for several prompts, from their log-probabilities [rows, labels]."""
    highest = log_probabilities.max(axis=1, keepdims=True)
    # Single labels may have probability 0, but not all labels of a row.
    is_possible = np.isfinite(highest[:, 0])
    weights = np.exp(log_probabilities - np.where(np.isfinite(highest), highest, 0.0))
    totals = weights.sum(axis=1, keepdims=True)
    distinct = set(labels)
    extends_none = [not any(label[:length] in distinct for length in range(1, len(label))) for label in labels]
    mass = np.exp(log_probabilities[:, extends_none]).sum(axis=1)
    probabilities = weights / np.where(totals > 0, totals, 1.0)
    return LabelTable(probabilities, is_possible, np.minimum(mass, 1.0))


def _short(label: str) -> str:
    return repr(label if len(label) <= 40 else label[:40] + "…")

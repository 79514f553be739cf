"""The probe of a checkpoint's `prompt.json`: a question with a known answer, asked before the server is ready.

A wrong template, a wrong head or damaged weights produce bad scores without an error. The probe detects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moepass.models.checkpoint.checkpoint_folders import PROMPT_FILE, KnownAnswer
from moepass.models.errors import CheckpointError, InputError
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.questions.question_tree import QuestionTree
from moepass.runtime.serving.questions.request_tree import RequestTree, TreeAnswer
from moepass.runtime.serving.questions.wordings import SYSTEMONE, Option, Question
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request

# A salt that no client uses keeps the probe's blocks out of their cache.
_SALT = b"probe"


def check_known_answer(
    writer: PromptWriter,
    ask: Callable[[Request], Answer],
    class_names: Sequence[str] = (),
    padding: int | None = None,
) -> None:
    """Ask the probe of `writer.prompt`, if there is one, and check its answer.

    `class_names` are the classes of a model with class scores, which skip the token `padding` at the end; empty for a
    model that predicts tokens. Raises CheckpointError if the expected answer is not the most probable one, or if the
    probe cannot be asked.
    """
    probe = writer.prompt.probe
    if probe is None:
        return
    try:
        if class_names:
            scores = _class_scores(writer, probe, ask, class_names, padding)
        else:
            scores = _probabilities(writer, probe, ask)
    except InputError as error:
        raise CheckpointError(f"the probe in {PROMPT_FILE} cannot be asked: {error}", name="probe") from error
    best = max(scores, key=scores.__getitem__)
    if scores[probe.expected] < scores[best]:
        text = (
            f"the model fails the probe in its {PROMPT_FILE}: its best answer is {best!r} with {scores[best]:.3g}, and "
            f"the expected answer {probe.expected!r} has {scores[probe.expected]:.3g}; check the template and the "
            "weights"
        )
        raise CheckpointError(text, name="probe", value=best, expected=probe.expected)


def _probabilities(writer: PromptWriter, probe: KnownAnswer, ask: Callable[[Request], Answer]) -> dict[str, float]:
    question = Question("choice", probe.question, tuple(map(Option, probe.answers)))
    tree = QuestionTree(writer, probe.input, [question], SYSTEMONE, names=["the probe"])
    request = tree.request("probe", _SALT)
    (answer,) = tree.answers(None if request is None else TreeAnswer(tree.tree, ask(request)))
    if answer.refusal is not None:
        raise InputError(answer.refusal, name="probe")
    return dict(zip(probe.answers, answer.probabilities, strict=True))


def _class_scores(
    writer: PromptWriter,
    probe: KnownAnswer,
    ask: Callable[[Request], Answer],
    class_names: Sequence[str],
    padding: int | None,
) -> dict[str, float]:
    unknown = [answer for answer in probe.answers if answer not in class_names]
    if unknown:
        problem = f"the answer {unknown[0]!r} is not one of the model's classes: {', '.join(class_names)}"
        raise InputError(problem, name="answers", value=unknown[0], expected=tuple(class_names))
    tree = RequestTree(writer.most_tokens)
    sequence = tree.add_classified(writer.encode_plain([probe.input], name="the probe")[0], padding, "the probe")
    scores = np.asarray(TreeAnswer(tree, ask(tree.request("probe", _SALT))).vector(sequence)).tolist()
    by_class = dict(zip(class_names, scores, strict=True))
    return {answer: by_class[answer] for answer in probe.answers}

"""POST /v1/systemone: typed questions about a state, in the format of the System One API and transformers' server."""

from __future__ import annotations

import msgspec

from moepass.models.errors import InputError
from moepass.models.limits import MOST_QUESTIONS
from moepass.runtime.serving.questions.question_tree import (
    QuestionAnswer,
    QuestionTree,
    checked_question,
    confidence,
    expected_level,
)
from moepass.runtime.serving.questions.wordings import SYSTEMONE, Option, Question
from moepass.runtime.serving.routes.decision_routes import (
    JsonText,
    OrdersBody,
    OrdersReply,
    ask,
    orders_of,
    with_orders,
)
from moepass.runtime.serving.routes.message_text import check_no_images, check_not_blank, json_text
from moepass.runtime.serving.routes.prompt_inputs import check_count
from moepass.runtime.serving.routes.service import Call, Route


class NoulQuestion(msgspec.Struct, tag_field="type", tag="noul"):
    """A question that is answered with true or false; `criteria` may describe `true` and `false`."""

    instructions: JsonText | None = None
    criteria: dict[str, JsonText | None] | None = None


class ChoiceQuestion(msgspec.Struct, tag_field="type", tag="choice"):
    """A question that is answered with one of several options; `criteria` maps options to descriptions."""

    criteria: dict[str, JsonText | None]
    instructions: JsonText | None = None


class ScoreQuestion(msgspec.Struct, tag_field="type", tag="score"):
    """A question that is answered on a scale; `criteria` are the levels, lowest first."""

    criteria: list[JsonText]
    instructions: JsonText | None = None


class SystemoneBody(OrdersBody):
    """The body of /v1/systemone."""

    state: JsonText
    questions: dict[str, NoulQuestion | ChoiceQuestion | ScoreQuestion]


class NoulReply(OrdersReply, tag_field="type", tag="noul"):
    """The answer to a noul question: the probability of "true"."""

    noul: float
    label_mass: float


class ChosenReply(OrdersReply, tag_field="type", tag="choice"):
    """The answer to a choice."""

    choice: str
    confidence: float
    probabilities: dict[str, float]
    label_mass: float


class ScoredReply(OrdersReply, tag_field="type", tag="score"):
    """The answer to a score; `score` is the mean level, and `legend` maps levels to their descriptions."""

    score: float
    legend: dict[str, JsonText]
    confidence: float
    probabilities: dict[str, float]
    label_mass: float


class SystemoneUsage(msgspec.Struct):
    """Tokens of the request."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int = 0


class SystemoneReply(msgspec.Struct):
    """The reply of /v1/systemone, with the answers by the names of the questions."""

    model: str
    answers: dict[str, NoulReply | ChosenReply | ScoredReply]
    usage: SystemoneUsage


async def systemone(call: Call) -> SystemoneReply:
    """Answer the questions of the body."""
    body = call.body(SystemoneBody)
    call.need_predictions()
    check_count(body.questions, "questions", MOST_QUESTIONS)
    answers = await ask(call, _tree, body)
    replies = {}
    for (name, question), answer in zip(body.questions.items(), answers, strict=True):
        if answer.refusal is not None:  # this reply has no refusals of single questions
            raise InputError(f"questions[{name!r}] cannot be answered: {answer.refusal}", name="questions")
        replies[name] = with_orders(_reply(question, answer), answer, body)
    return SystemoneReply(call.model, replies, SystemoneUsage(call.tokens, call.cached_tokens))


def _tree(call: Call, body: SystemoneBody) -> QuestionTree:
    check_no_images(body.state, "state")
    text = check_not_blank(json_text(body.state, compact=False), "state")
    names = [f"questions[{name!r}]" for name in body.questions]
    questions = [_question(question, name) for question, name in zip(body.questions.values(), names, strict=True)]
    return QuestionTree(call.writer, text, questions, SYSTEMONE, **orders_of(body), text_name="state", names=names)


def _question(question: NoulQuestion | ChoiceQuestion | ScoreQuestion, name: str) -> Question:
    text = json_text(question.instructions, compact=False)
    match question:
        case NoulQuestion():
            criteria = question.criteria or {}
            unknown = [key for key in criteria if key not in ("true", "false")]
            if unknown:
                raise InputError(f"{name}: criteria has the key {unknown[0]!r}; use true and false only", name=name)
            options = [Option(key, json_text(criteria.get(key), compact=False)) for key in ("true", "false")]
            return Question("predicate", text, tuple(options))
        case ChoiceQuestion():
            options = [Option(key, json_text(value, compact=False)) for key, value in question.criteria.items()]
            return checked_question("choice", text, options, name, "criteria")
        case ScoreQuestion():
            levels = [
                Option(str(number), json_text(level, compact=False)) for number, level in enumerate(question.criteria)
            ]
            return checked_question("score", text, levels, name, "criteria")


def _reply(
    question: NoulQuestion | ChoiceQuestion | ScoreQuestion, answer: QuestionAnswer
) -> NoulReply | ChosenReply | ScoredReply:
    values = answer.probabilities
    match question:
        case NoulQuestion():
            return NoulReply(values[0], answer.mass)
        case ChoiceQuestion():
            names = list(question.criteria)
            by_name = dict(zip(names, values, strict=True))
            return ChosenReply(names[answer.best], confidence("choice", values), by_name, answer.mass)
        case ScoreQuestion():
            by_level = {str(level): probability for level, probability in enumerate(values)}
            legend = {str(level): criterion for level, criterion in enumerate(question.criteria)}
            return ScoredReply(expected_level(values), legend, confidence("score", values), by_level, answer.mass)


ROUTES = (Route("POST", "/v1/systemone", systemone, (SystemoneBody,), (SystemoneReply,)),)

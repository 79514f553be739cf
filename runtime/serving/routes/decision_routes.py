"""POST /v1/decisions, with the body of openai's `client.decisions.create` or of SGLang's clients.

The questions distinguish the two bodies: OpenAI's have `instructions`, SGLang's have an `id`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from moepass.models.errors import InputError
from moepass.models.limits import MOST_ORDERS, MOST_QUESTIONS
from moepass.runtime.serving.questions.question_tree import (
    QuestionAnswer,
    QuestionTree,
    checked_question,
    confidence,
    expected_level,
)
from moepass.runtime.serving.questions.request_tree import TreeAnswer
from moepass.runtime.serving.questions.wordings import SGLANG, SGLANG_VERSION, SYSTEMONE, Option, Question
from moepass.runtime.serving.routes.message_text import (
    Content,
    InputItem,
    check_not_blank,
    content_text,
    input_text,
    json_text,
)
from moepass.runtime.serving.routes.service import Call, ModelBody, Priority, Route, Salt, TokenUsage

_Body = TypeVar("_Body")
_Reply = TypeVar("_Reply")
JsonText = str | dict[str, Any] | list[Any]
Permutations = Annotated[int, Meta(ge=1, le=MOST_ORDERS)] | None


class DecisionPredicate(msgspec.Struct, tag_field="type", tag="predicate"):
    """A question that is answered with the probability of "true"."""

    instructions: Content
    name: str | None = None


class DecisionOption(msgspec.Struct):
    """An option of a choice."""

    value: str | bool
    description: str | None = None


class DecisionChoice(msgspec.Struct, tag_field="type", tag="choice"):
    """A question that is answered with one of several options."""

    instructions: Content
    choices: list[DecisionOption]
    name: str | None = None


class DecisionLevel(msgspec.Struct):
    """A level of a score."""

    label: str
    description: str | None = None


class DecisionScore(msgspec.Struct, tag_field="type", tag="score"):
    """A question that is answered on a scale of levels, lowest first."""

    instructions: Content
    levels: list[DecisionLevel]
    name: str | None = None


class DecisionsBody(msgspec.Struct):
    """OpenAI's body of /v1/decisions.

    Two extensions average over several orders of the options: `permutations` is the number of orders. With
    `order_invariant`, the answer does not depend on the order in the body.
    """

    model: str
    input: str | list[InputItem]
    questions: Annotated[
        list[DecisionPredicate | DecisionChoice | DecisionScore], Meta(min_length=1, max_length=MOST_QUESTIONS)
    ]
    prompt_cache_key: Salt = None
    permutations: Permutations = None
    order_invariant: bool = False
    priority: Priority = 0


class OrdersReply(msgspec.Struct, kw_only=True):
    """In how many orders of its options a question was asked, if the body asks for several.

    `spread` is the largest difference of an option's probability between two orders.
    """

    orders: int | msgspec.UnsetType = msgspec.UNSET
    spread: float | msgspec.UnsetType = msgspec.UNSET


class PredicateReply(OrdersReply, tag_field="type", tag="predicate"):
    """The answer to a predicate."""

    name: str | None
    probability: float
    label_mass: float


class ValueProbability(msgspec.Struct):
    """The probability of an option."""

    value: str | bool
    probability: float


class ChoiceReply(OrdersReply, tag_field="type", tag="choice"):
    """The answer to a choice."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ValueProbability]
    label_mass: float


class LevelProbability(msgspec.Struct):
    """The probability of a level; `value` is its number, from 0 on."""

    value: int
    label: str
    probability: float


class ScoreReply(OrdersReply, tag_field="type", tag="score"):
    """The answer to a score; `score` is the mean level."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]
    label_mass: float


class RefusalReply(msgspec.Struct, tag_field="type", tag="refusal"):
    """The reason why this model cannot answer the question."""

    name: str | None
    reason: str


class InputDetails(msgspec.Struct):
    """Input tokens that came from the cache. `cache_write_tokens` is always 0."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Output tokens by kind; always 0."""

    reasoning_tokens: int = 0


class DecisionsUsage(msgspec.Struct):
    """Tokens of the request. Tokens that questions share count once. No output tokens are decoded."""

    input_tokens: int
    input_tokens_details: InputDetails
    total_tokens: int
    output_tokens: int = 0
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)


class DecisionsReply(msgspec.Struct):
    """The reply to OpenAI's body, with an answer for each question."""

    model: str
    answers: list[PredicateReply | ChoiceReply | ScoreReply | RefusalReply]
    usage: DecisionsUsage


class LabelledOption(msgspec.Struct):
    """An option of a choice."""

    name: str
    description: JsonText | None = None


class LabelledChoice(msgspec.Struct, tag_field="type", tag="choice"):
    """A question that is answered with one of several options."""

    id: str
    question: JsonText
    options: list[LabelledOption]


class LabelledScore(msgspec.Struct, tag_field="type", tag="score"):
    """A question that is answered on a scale of levels, lowest first."""

    id: str
    question: JsonText
    levels: list[JsonText]


class LabelledYesNo(msgspec.Struct, tag_field="type", tag="yes_no"):
    """A question that is answered with yes or no."""

    id: str
    question: JsonText
    yes: JsonText | None = None
    no: JsonText | None = None


class OrdersBody(ModelBody, kw_only=True):
    """The two extensions of OpenAI's body, for other bodies with questions."""

    permutations: Permutations = None
    order_invariant: bool = False


class LabelledBody(OrdersBody):
    """SGLang's body of /v1/decisions."""

    input: JsonText
    questions: Annotated[
        list[LabelledChoice | LabelledScore | LabelledYesNo], Meta(min_length=1, max_length=MOST_QUESTIONS)
    ]


class LabelledAnswer(OrdersReply, omit_defaults=True):
    """The answer to one question."""

    type: Literal["choice", "score", "yes_no"]
    probabilities: dict[str, float]
    label_mass: float
    choice: str | None = None
    score: float | None = None


class LabelledReply(msgspec.Struct):
    """The reply to SGLang's body, with the answers by the ids of the questions."""

    model: str
    answers: dict[str, LabelledAnswer]
    usage: TokenUsage
    prompt_format_version: int = SGLANG_VERSION


async def create_decision(call: Call) -> DecisionsReply | LabelledReply:
    """Answer the questions of either body."""
    questions = call.json().get("questions")
    first = questions[0] if isinstance(questions, list) and questions else None
    if isinstance(first, dict) and "id" in first and "instructions" not in first:
        return await _labelled(call)
    body = call.body(DecisionsBody)
    call.need_predictions()
    call.salt = (body.prompt_cache_key or "").encode()
    answers = await ask(call, _tree, body)
    return DecisionsReply(
        call.model,
        [
            with_orders(_reply(question, answer), answer, body)
            for question, answer in zip(body.questions, answers, strict=True)
        ],
        DecisionsUsage(call.tokens, InputDetails(call.cached_tokens), call.tokens),
    )


async def ask(call: Call, make_tree: Callable[[Call, _Body], QuestionTree], body: _Body) -> list[QuestionAnswer]:
    """Return the answers to the questions of the tree that `make_tree` returns for a call and its body."""
    tree = await call.prepare(make_tree, call, body)
    request = await call.prepare(tree.request, call.id, call.salt)
    answer = None if request is None else TreeAnswer(tree.tree, await call.answer(request))
    return await call.prepare(tree.answers, answer)


def orders_of(body: DecisionsBody | OrdersBody) -> dict[str, Any]:
    """Return the arguments of a QuestionTree for the orders of options that a body asks for."""
    most = MOST_ORDERS if body.order_invariant else 1
    return {"orders": body.permutations or most, "order_invariant": body.order_invariant}


def with_orders(reply: _Reply, answer: QuestionAnswer, body: DecisionsBody | OrdersBody) -> _Reply:
    """Return the reply to a question, with the orders and the spread of `answer` if `body` asks for several orders."""
    if isinstance(reply, OrdersReply) and (body.permutations is not None or body.order_invariant):
        reply.orders, reply.spread = answer.orders, answer.spread
    return reply


def _tree(call: Call, body: DecisionsBody) -> QuestionTree:
    names = [_question_name(number, question.name) for number, question in enumerate(body.questions)]
    questions = [_question(question, f"questions[{number}]") for number, question in enumerate(body.questions)]
    text = input_text(body.input)
    return QuestionTree(call.writer, text, questions, SYSTEMONE, **orders_of(body), names=names)


def _question(question: DecisionPredicate | DecisionChoice | DecisionScore, name: str) -> Question:
    text = check_not_blank(content_text(question.instructions, f"{name}.instructions"), f"{name}.instructions")
    match question:
        case DecisionPredicate():
            return Question("predicate", text, (Option("true"), Option("false")))
        case DecisionChoice():
            values = [option.value for option in question.choices]
            # The string "true" and the boolean true are different values in JSON.
            if len({(type(value), value) for value in values}) < len(values):
                problem = f"{name}.choices contains a value twice; values must be unique"
                raise InputError(problem, name=f"{name}.choices")
            options = [Option(_value_text(option.value), option.description or "") for option in question.choices]
            return checked_question("choice", text, options, f"{name}.choices", "values")
        case DecisionScore():
            levels = [
                Option(level.label, f"{level.label}: {level.description}" if level.description else level.label)
                for level in question.levels
            ]
            return checked_question("score", text, levels, f"{name}.levels", "levels")


def _question_name(number: int, name: str | None) -> str:
    """Return the name of a question in errors, which starts with its path in the body."""
    return f"questions[{number}]" + (f" ({name!r})" if name else "")


def _value_text(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _reply(
    question: DecisionPredicate | DecisionChoice | DecisionScore, answer: QuestionAnswer
) -> PredicateReply | ChoiceReply | ScoreReply | RefusalReply:
    if answer.refusal is not None:
        return RefusalReply(question.name, answer.refusal)
    probabilities = answer.probabilities
    match question:
        case DecisionPredicate():
            return PredicateReply(question.name, probabilities[0], answer.mass)
        case DecisionChoice():
            values = [option.value for option in question.choices]
            choices = [ValueProbability(*pair) for pair in zip(values, probabilities, strict=True)]
            best = values[answer.best]
            return ChoiceReply(question.name, best, confidence("choice", probabilities), choices, answer.mass)
        case DecisionScore():
            levels = [
                LevelProbability(number, level.label, probability)
                for number, (level, probability) in enumerate(zip(question.levels, probabilities, strict=True))
            ]
            score = expected_level(probabilities)
            return ScoreReply(question.name, score, confidence("score", probabilities), levels, answer.mass)


async def _labelled(call: Call) -> LabelledReply:
    body = call.body(LabelledBody)
    call.need_predictions()
    ids = [question.id for question in body.questions]
    if len(set(ids)) < len(ids):
        raise InputError("two questions have the same id; ids must be unique", name="questions")
    answers = await ask(call, _labelled_tree, body)
    replies = {}
    for number, (question, answer) in enumerate(zip(body.questions, answers, strict=True)):
        if answer.refusal is not None:  # this reply has no refusals of single questions
            name = _question_name(number, question.id)
            raise InputError(f"{name} cannot be answered: {answer.refusal}", name=name)
        replies[question.id] = with_orders(_labelled_answer(question, answer), answer, body)
    return LabelledReply(call.model, replies, call.usage)


def _labelled_tree(call: Call, body: LabelledBody) -> QuestionTree:
    text = check_not_blank(json_text(body.input), "input")
    names = [_question_name(number, question.id) for number, question in enumerate(body.questions)]
    questions = [_labelled_question(question, name) for question, name in zip(body.questions, names, strict=True)]
    return QuestionTree(call.writer, text, questions, SGLANG, **orders_of(body), names=names)


def _labelled_question(question: LabelledChoice | LabelledScore | LabelledYesNo, name: str) -> Question:
    text = json_text(question.question)
    match question:
        case LabelledChoice():
            names = [option.name for option in question.options]
            if len(set(names)) < len(names):
                raise InputError(f"{name} has two options with the same name; names must be unique", name=name)
            options = [Option(option.name, json_text(option.description)) for option in question.options]
            return checked_question("choice", text, options, name, "options")
        case LabelledScore():
            levels = [Option(str(number), json_text(level)) for number, level in enumerate(question.levels)]
            return checked_question("score", text, levels, name, "levels")
        case LabelledYesNo():
            described = [json_text(value) for value in (question.yes, question.no)]
            return Question("predicate", text, (Option("yes", described[0]), Option("no", described[1])))


def _labelled_answer(
    question: LabelledChoice | LabelledScore | LabelledYesNo, answer: QuestionAnswer
) -> LabelledAnswer:
    probabilities = answer.probabilities
    match question:
        case LabelledChoice():
            names = [option.name for option in question.options]
            by_name = dict(zip(names, probabilities, strict=True))
            return LabelledAnswer("choice", by_name, answer.mass, choice=names[answer.best])
        case LabelledScore():
            by_level = {str(level): probability for level, probability in enumerate(probabilities)}
            return LabelledAnswer("score", by_level, answer.mass, score=expected_level(probabilities))
        case LabelledYesNo():
            return LabelledAnswer("yes_no", dict(zip(("yes", "no"), probabilities, strict=True)), answer.mass)


ROUTES = (
    Route("POST", "/v1/decisions", create_decision, (DecisionsBody, LabelledBody), (DecisionsReply, LabelledReply)),
)

"""Texts of a stream are scored against one set of labels, window by window, through the engine of this process.

Pseudo-code
    a window: texts become prompts until there are tokens for some full steps; the rest of the stream is not read yet
    its prompts are sorted, so that those which begin alike stand in the same step, where the trie computes that once
    steps are filled with tokens up to the engine's threshold
    the window's scores leave it in the order of the texts
A text that cannot be scored takes its error with it and stops nobody else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from moepass.models.errors import CheckpointError, InputError, MoepassError
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.offline.encoded_texts import EncodedPart, NamedText, encoded_parts, named_error
from moepass.runtime.serving.offline.label_pieces import LabelPieces
from moepass.runtime.serving.questions.labels import (
    IMPOSSIBLE,
    ImpossibleLabelsError,
    encode_labels,
    label_warnings,
    score_label_rows,
)
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.requests.request import NO_TOKENS, Tokens

# Full steps of a window. [Empirical] Of 20,000 short lines, windows of half as many compute a sixth more; and the
# longer a window, the later its answers come.
WINDOW_STEPS = 64
# A window has no more texts than that.
MOST_TEXTS = 1 << 15
# Labels behind so many different last words are remembered.
_REMEMBERED = 1024


_Text = TypeVar("_Text", bound=NamedText)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScoredWindow(Generic[_Text]):
    """Texts in their order, and of each its row in the tables, or the error that it has instead.

    probabilities   [rows, labels], which compete among the labels and sum to 1
    mass            [rows] what the model gives to all labels together, of everything that it could have said
    tokens          of all prompts; `computed_tokens` of them and of the labels were computed
    """

    texts: list[_Text]
    outcomes: list[int | MoepassError]
    probabilities: npt.NDArray[np.float64]
    mass: npt.NDArray[np.float64]
    tokens: int
    computed_tokens: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Prompt:
    """`place` among the texts of the window."""

    place: int
    tokens: Tokens
    labels: LabelPieces


class TextScorer:
    """Scores texts against `labels`.

    Args:
        engine: computes them.
        writer: makes prompts of texts.
        labels: candidate answers, rendered text as prompts are; where the prompt names its own, also by their names.
        most_texts: that run in one step together; None: as many as fill it.

    Raises InputError for an engine that predicts no tokens, for labels that cannot be told apart where they follow the
    template, and for ones that the model cannot take.
    """

    def __init__(
        self, engine: ModelEngine, writer: PromptWriter, labels: Sequence[str], most_texts: int | None = None
    ) -> None:
        if not engine.facts.predicts_tokens:
            raise InputError(
                "the model has no head that predicts tokens, so that it cannot be asked for labels; "
                f"its head gives {engine.facts.vector}",
                name="model",
                value=engine.facts.vector,
            )
        self.engine, self.writer, self.labels = engine, writer, tuple(labels)
        self._most_texts = MOST_TEXTS if most_texts is None else most_texts
        self._most_tokens = min(engine.facts.max_sequence_tokens, engine.facts.most_tokens)
        self.label_numbers = {label: number for number, label in enumerate(self.labels)}
        called = writer.called_labels
        self._rendered_labels = tuple(called.get(label, label) for label in self.labels)
        self._known: dict[str, LabelPieces] = {}
        # Behind the template alone, so that wrong labels are refused before any text is read.
        longest = self._labels_behind(writer.render("x")).longest
        if longest >= self._most_tokens:
            raise InputError(
                f"the longest label has {longest + 1} tokens, but the model takes at most {self._most_tokens} with the "
                "prompt; shorten the label",
                name="label",
                value=longest + 1,
                expected=self._most_tokens,
            )

    def warnings(self, text: str) -> list[str]:
        """A sentence for each label that is hardly what was meant, where it follows the prompt of `text`."""
        own, called = self.writer.prompt, self.writer.called_labels
        unknown = [label for label in self.labels if label not in called] if own.label_names and called else []
        found = [
            f"label {label!r} is none of the {len(own.labels)} that this model answers with "
            f"({', '.join(own.labels[:3])}, …); its tokens are scored all the same"
            for label in unknown
        ]
        return found + label_warnings(self.writer.encoder, self.writer.render(text), self._rendered_labels)

    def windows(self, texts: Iterable[_Text], *, stops: bool = True) -> Iterator[ScoredWindow[_Text]]:
        """The scores of `texts`. Raises CheckpointError where the model's logits are no numbers.

        `stops`: the error of the first text that cannot be scored is raised, and nothing of its window comes out.
        """
        return self.windows_of(encoded_parts(self.writer, texts), stops=stops)

    def windows_of(self, parts: Iterable[EncodedPart[_Text]], *, stops: bool = True) -> Iterator[ScoredWindow[_Text]]:
        """As `windows`, of texts that are encoded already by the same writer."""
        source = iter(parts)
        while window := self._read_window(source):
            if stops:
                _raise_first(window[1])
            scored = self._scored(*window)
            if stops:
                _raise_first(scored.outcomes)
            yield scored

    # ---- Texts become prompts

    def _read_window(
        self, source: Iterator[EncodedPart[_Text]]
    ) -> tuple[list[_Text], list[_Prompt | InputError]] | None:
        texts: list[_Text] = []
        prompts: list[_Prompt | InputError] = []
        tokens, enough = 0, WINDOW_STEPS * self.engine.facts.full_step_tokens
        while tokens < enough and len(texts) < MOST_TEXTS and (part := next(source, None)) is not None:
            found = self._prompts(part, len(texts))
            texts += part.texts
            prompts += found
            tokens += sum(len(prompt.tokens) for prompt in found if isinstance(prompt, _Prompt))
        return (texts, prompts) if texts else None

    def _prompts(self, part: EncodedPart[_Text], first: int) -> list[_Prompt | InputError]:
        found: list[_Prompt | InputError] = []
        for place, (text, prompt) in enumerate(zip(part.texts, part.prompts, strict=True), first):
            if isinstance(prompt, InputError):
                found.append(prompt)
                continue
            rendered, tokens = prompt
            try:
                labels = self._labels_behind(rendered)
                self._check_length(tokens, labels, text.name)
                found.append(_Prompt(place, tokens, labels))
            except InputError as error:
                found.append(named_error(error, text.name))
        return found

    def _labels_behind(self, rendered: str) -> LabelPieces:
        context = _last_word(self.writer.encoder.context_of(rendered))
        known = self._known.get(context)
        if known is None:
            if len(self._known) == _REMEMBERED:
                del self._known[next(iter(self._known))]
            known = self._known[context] = LabelPieces(
                encode_labels(self.writer.encoder, context, self._rendered_labels)
            )
        return known

    def _check_length(self, tokens: Tokens, labels: LabelPieces, name: str) -> None:
        room = self._most_tokens - labels.longest
        if not len(tokens):
            raise InputError(f"{name}: the prompt has no tokens", name=name, value=0, expected="1 or more")
        vocabulary = self.engine.facts.vocabulary_size
        if tokens.max() >= vocabulary:
            raise InputError(
                f"{name}: token {tokens.max()} is none of the model, which has {vocabulary}; tokenizer and model do "
                "not belong together",
                name=name,
                value=int(tokens.max()),
                expected=range(vocabulary),
            )
        if len(tokens) > room:
            raise InputError(
                f"{name}: the prompt has {len(tokens)} tokens, but the model takes at most {room}"
                + (f" beside the labels' {labels.longest}" if labels.longest else "")
                + "; shorten the text, or set max_text_tokens in prompt.json to have long texts cut",
                name=name,
                value=len(tokens),
                expected=room,
            )

    # ---- Prompts become scores

    def _scored(self, texts: list[_Text], prompts: list[_Prompt | InputError]) -> ScoredWindow[_Text]:
        asked = [prompt for prompt in prompts if isinstance(prompt, _Prompt)]
        outcomes: list[int | MoepassError] = [prompt if isinstance(prompt, InputError) else -1 for prompt in prompts]
        for row, prompt in enumerate(asked):
            outcomes[prompt.place] = row
        log_probabilities = np.zeros((len(asked), len(self.labels)))
        computed = 0
        for step in self._steps(asked):
            result = self.engine.step(
                [asked[row].labels.request(str(row), asked[row].tokens) for row in step], compares=False
            )
            computed += result.tokens
            refused = dict(result.refused)
            for number, reason in refused.items():
                place = asked[int(number)].place
                outcomes[place] = InputError(f"{texts[place].name}: {reason}", name=texts[place].name)
            answered = [row for row in step if str(row) not in refused]
            for labels, places in _by_labels(asked, answered):
                answers = [result.answers[place] for place in places]
                log_probabilities[[answered[place] for place in places]] = labels.log_probabilities(answers)
        if np.isnan(log_probabilities).any():
            row = int(np.isnan(log_probabilities).any(1).argmax())
            raise _no_numbers(texts[asked[row].place].name, log_probabilities[row])
        probabilities, mass = np.zeros_like(log_probabilities), np.zeros(len(asked))
        for labels, rows in _by_labels(asked, range(len(asked))):
            table = score_label_rows(labels.labels, log_probabilities[rows])
            probabilities[rows], mass[rows] = table.probabilities, table.mass
            for row in np.array(rows)[~table.is_possible].tolist():
                name = texts[asked[row].place].name
                outcomes[asked[row].place] = ImpossibleLabelsError(f"{name}: {IMPOSSIBLE}", name=name)
        tokens = sum(len(prompt.tokens) for prompt in asked)
        return ScoredWindow(texts, outcomes, probabilities, mass, tokens, computed)

    def _steps(self, asked: Sequence[_Prompt]) -> Iterator[list[int]]:
        """Rows of `asked`, so many that their tokens fill a step, those that prompts share counted once."""
        facts = self.engine.facts
        if facts.form == "trie":
            # In the order of their tokens, what prompts share stands side by side: big-endian bytes sort as numbers do.
            names = [prompt.tokens.astype(">i4").tobytes() for prompt in asked]
            order = sorted(range(len(asked)), key=names.__getitem__)
        else:
            order = sorted(range(len(asked)), key=lambda row: -len(asked[row].tokens))
        step: list[int] = []
        filled, before = 0, NO_TOKENS
        for row in order:
            tokens = asked[row].tokens
            added = len(tokens) - (_shared(before, tokens) if step and facts.form == "trie" else 0)
            added += asked[row].labels.count
            if step and (filled + added > facts.most_tokens or len(step) >= self._most_texts):
                yield step
                step, filled, added = [], 0, len(tokens) + asked[row].labels.count
            step.append(row)
            filled += added
            before = tokens
            if filled >= facts.full_step_tokens:
                yield step
                step, filled = [], 0
        if step:
            yield step


def _raise_first(found: Sequence[object]) -> None:
    for one in found:
        if isinstance(one, MoepassError):
            raise one


def _last_word(context: str) -> str:
    """The end of `context` from its last blank on that has a letter behind it: tokens do not reach over it."""
    words = context.rstrip()
    start = next((place for place in reversed(range(len(words))) if words[place].isspace()), 0)
    return context[start:]


def _shared(left: Tokens, right: Tokens) -> int:
    """How many tokens both begin with."""
    count = min(len(left), len(right))
    differ = left[:count] != right[:count]
    place = int(differ.argmax()) if count else 0
    return place if count and differ[place] else count


def _by_labels(asked: Sequence[_Prompt], rows: Sequence[int]) -> Iterator[tuple[LabelPieces, list[int]]]:
    """The places in `rows` of prompts that have the same labels behind them."""
    found: dict[int, tuple[LabelPieces, list[int]]] = {}
    for place, row in enumerate(rows):
        labels = asked[row].labels
        found.setdefault(id(labels), (labels, []))[1].append(place)
    yield from found.values()


def _no_numbers(name: str, values: npt.NDArray[np.float64]) -> CheckpointError:
    shown = ", ".join(f"{value:g}" for value in values[:3]) + (f" and {len(values) - 3} more" * (len(values) > 3))
    return CheckpointError(
        f"{name}: the log-probabilities of the labels are {shown}, so the model's logits are no numbers there; its "
        "weights are damaged, or too large for their type (load the model in float32 to tell which)",
        name=name,
        value=tuple(values.tolist()),
    )

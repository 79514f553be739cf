"""Scoring of a stream of texts against one set of labels, window by window, with the engine of this process.

Pseudo-code
    a window: read and encode texts until their tokens fill several steps; the remaining stream is not read yet
    sort its prompts, so that prompts with a common prefix share a step, in which the trie computes the prefix once
    fill steps with tokens up to the engine's threshold
    return the window's scores in the order of the texts
A text that cannot be scored yields its error; the other texts are not affected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from moepass.models.errors import CheckpointError, InputError, MoepassError
from moepass.runtime.serving.engine.model_engine import ModelEngine
from moepass.runtime.serving.offline.encoded_texts import EncodedChunk, NamedText, encoded_chunks, named_error
from moepass.runtime.serving.questions.labels import (
    IMPOSSIBLE,
    ImpossibleLabelsError,
    LabelTokens,
    encode_labels,
    label_warnings,
    score_label_rows,
)
from moepass.runtime.serving.questions.prompts import PromptWriter
from moepass.runtime.serving.questions.request_tree import RequestTree
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import NO_TOKENS, Request, TokenPiece, TokenRead, Tokens

# Full steps of a window. [Empirical] With 20,000 short lines, windows of 32 steps compute a sixth more tokens. A longer
# window delays its answers.
WINDOW_STEPS = 64
# The largest number of texts in a window.
MOST_TEXTS = 1 << 15
# Label pieces are cached for this number of different last words.
_CACHED_CONTEXTS = 1024

_Text = TypeVar("_Text", bound=NamedText)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScoredWindow(Generic[_Text]):
    """The scores of a window of texts.

    Attributes:
        outcomes: For each text its row in the tables, or its error.
        probabilities: [rows, labels]; each row is a softmax over the labels and sums to 1.
        mass: [rows], the total probability of all labels.
    """

    texts: list[_Text]
    outcomes: list[int | MoepassError]
    probabilities: npt.NDArray[np.float64]
    mass: npt.NDArray[np.float64]


class LabelPieces:
    """The reads and pieces that ask for `labels` behind any prompt. They are made once for many prompts.

    The longest label adds `longest` tokens to a sequence, all but its last one. All labels together add `count` to a
    step.
    """

    def __init__(self, labels: Sequence[LabelTokens]) -> None:
        self.labels = tuple(labels)
        self.longest = max(len(label) for label in labels) - 1
        firsts = sorted({label[0] for label in labels})
        self._first_tokens = np.array(firsts, np.int32)
        self._first_columns = np.array([firsts.index(label[0]) for label in labels], np.int64)
        tree = RequestTree(self.longest)
        reads = []
        for number, label in enumerate(labels):
            if len(label) > 1:
                sequence = tree.add(label[:-1])
                reads += [(number, sequence, position, token) for position, token in enumerate(label[1:])]
        for _, sequence, position, token in reads:
            tree.read(sequence, position, [token])
        # The first piece of a request is the prompt; the pieces of the labels follow it.
        pieces = tree.request("labels").pieces if reads else ()
        self._pieces = tuple(TokenPiece(piece.parent + 1, piece.tokens, piece.reads) for piece in pieces)
        self.count = sum(len(piece.tokens) for piece in self._pieces)
        # By (piece, read) of a request: the columns of the read, and the labels to which they belong.
        self._later_tokens: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for number, sequence, position, token in reads:
            node, offset = tree.node_at(sequence, position)
            read = node.reads[offset]
            columns, numbers = self._later_tokens.setdefault((node.number + 1, read.index), ([], []))
            columns.append(read.columns[token])
            numbers.append(number)

    def request(self, request_id: str, prompt: Tokens) -> Request:
        """Return the request for all labels behind `prompt`."""
        first = TokenPiece(-1, prompt, (TokenRead(len(prompt) - 1, self._first_tokens),))
        return Request(request_id, (first, *self._pieces))

    def log_probabilities(self, answers: Sequence[Answer]) -> npt.NDArray[np.float64]:
        """Return the log-probability of each label, [answers, labels], from the answers to such requests."""
        firsts = np.array([answer.pieces[0].reads[0].log_probabilities for answer in answers], np.float64)
        sums = firsts.reshape(len(answers), -1)[:, self._first_columns]
        for (piece, read), (columns, numbers) in self._later_tokens.items():
            values = np.array([answer.pieces[piece].reads[read].log_probabilities for answer in answers], np.float64)
            # A read has at most one column per label, so `numbers` has no duplicates.
            sums[:, numbers] += values[:, columns]
        return sums


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class EncodedPrompt:
    """A prompt of a window; `index` is the index of its text."""

    index: int
    tokens: Tokens
    labels: LabelPieces


class TextScorer:
    """Scores texts against `labels`, as rendered text or as names of labels in `prompt.json`.

    A step has at most `most_texts` texts; None for as many as fill it. Raises InputError if the engine predicts no
    tokens, or if the labels are too long or cannot be distinguished.
    """

    def __init__(
        self, engine: ModelEngine, writer: PromptWriter, labels: Sequence[str], most_texts: int | None = None
    ) -> None:
        if not engine.facts.predicts_tokens:
            text = (
                f"the model's head returns {engine.facts.vector} instead of token logits, so it cannot score labels; "
                "use a language model"
            )
            raise InputError(text, name="model", value=engine.facts.vector)
        self.engine, self.writer, self.labels = engine, writer, tuple(labels)
        self._most_texts = MOST_TEXTS if most_texts is None else most_texts
        self._most_tokens = min(engine.facts.max_sequence_tokens, engine.facts.most_tokens)
        self.label_numbers = {label: number for number, label in enumerate(self.labels)}
        self._rendered_labels = tuple(writer.labels_by_name.get(label, label) for label in self.labels)
        self._pieces_by_context: dict[str, LabelPieces] = {}
        # Encoding the labels behind an example refuses wrong labels before any text is read.
        longest = self._labels_behind(writer.render("x")).longest
        if longest >= self._most_tokens:
            text = (
                f"the longest label has {longest + 1} tokens, but the model takes at most {self._most_tokens} tokens "
                "for prompt and label; shorten the label"
            )
            raise InputError(text, name="label", value=longest + 1, expected=self._most_tokens)

    def warnings(self, text: str) -> list[str]:
        """Return a warning for each label whose form behind the prompt of `text` is probably not the intended one."""
        prompt, by_name = self.writer.prompt, self.writer.labels_by_name
        unknown = [label for label in self.labels if label not in by_name] if prompt.label_names and by_name else []
        warnings = [
            f"label {label!r} is not one of the {len(prompt.labels)} labels that this model answers with "
            f"({', '.join(prompt.labels[:3])}, …); it is scored anyway"
            for label in unknown
        ]
        return warnings + label_warnings(self.writer.encoder, self.writer.render(text), self._rendered_labels)

    def windows(self, texts: Iterable[_Text], *, stops: bool = True) -> Iterator[ScoredWindow[_Text]]:
        """Yield the scores of `texts`, window by window. Raises CheckpointError if the model's logits are NaN.

        With `stops`, the error of the first text that cannot be scored is raised before its window is yielded.
        """
        return self.windows_of(encoded_chunks(self.writer, texts), stops=stops)

    def windows_of(self, parts: Iterable[EncodedChunk[_Text]], *, stops: bool = True) -> Iterator[ScoredWindow[_Text]]:
        """Yield the scores of encoded texts, as `windows` does. The same writer must have encoded them."""
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
        self, source: Iterator[EncodedChunk[_Text]]
    ) -> tuple[list[_Text], list[EncodedPrompt | InputError]] | None:
        texts: list[_Text] = []
        prompts: list[EncodedPrompt | InputError] = []
        tokens, window_tokens = 0, WINDOW_STEPS * self.engine.facts.full_step_tokens
        while tokens < window_tokens and len(texts) < MOST_TEXTS and (chunk := next(source, None)) is not None:
            chunk_prompts = self._prompts(chunk, len(texts))
            texts += chunk.texts
            prompts += chunk_prompts
            tokens += sum(len(prompt.tokens) for prompt in chunk_prompts if isinstance(prompt, EncodedPrompt))
        return (texts, prompts) if texts else None

    def _prompts(self, chunk: EncodedChunk[_Text], first: int) -> list[EncodedPrompt | InputError]:
        prompts: list[EncodedPrompt | InputError] = []
        for index, (text, prompt) in enumerate(zip(chunk.texts, chunk.prompts, strict=True), first):
            if isinstance(prompt, InputError):
                prompts.append(prompt)
                continue
            rendered, tokens = prompt
            try:
                labels = self._labels_behind(rendered)
                self._check_length(tokens, labels, text.name)
                prompts.append(EncodedPrompt(index, tokens, labels))
            except InputError as error:
                prompts.append(named_error(error, text.name))
        return prompts

    def _labels_behind(self, rendered: str) -> LabelPieces:
        full_context = self.writer.encoder.context_of(rendered)
        # No token extends over the last blank before a letter, so the context begins there.
        words = full_context.rstrip()
        context = full_context[next((index for index in reversed(range(len(words))) if words[index].isspace()), 0) :]
        pieces = self._pieces_by_context.get(context)
        if pieces is None:
            if len(self._pieces_by_context) == _CACHED_CONTEXTS:
                del self._pieces_by_context[next(iter(self._pieces_by_context))]
            pieces = LabelPieces(encode_labels(self.writer.encoder, context, self._rendered_labels))
            self._pieces_by_context[context] = pieces
        return pieces

    def _check_length(self, tokens: Tokens, labels: LabelPieces, name: str) -> None:
        limit = self._most_tokens - labels.longest
        if not len(tokens):
            text = f"{name}: the prompt has no tokens; check the template"
            raise InputError(text, name=name, value=0, expected="1 or more")
        vocabulary = self.engine.facts.vocabulary_size
        if tokens.max() >= vocabulary:
            text = (
                f"{name}: the tokenizer produced token {tokens.max()}, but the model has ids 0 to {vocabulary - 1}; "
                "use the tokenizer of this model"
            )
            raise InputError(text, name=name, value=int(tokens.max()), expected=range(vocabulary))
        if len(tokens) > limit:
            text = (
                f"{name}: the prompt has {len(tokens)} tokens, but the model takes at most {limit}"
                + (f" with {labels.longest} more for the labels" if labels.longest else "")
                + "; shorten the text, or set max_text_tokens in prompt.json to have long texts cut"
            )
            raise InputError(text, name=name, value=len(tokens), expected=limit)

    # ---- Prompts become scores

    def _scored(self, texts: list[_Text], prompts: list[EncodedPrompt | InputError]) -> ScoredWindow[_Text]:
        encoded = [prompt for prompt in prompts if isinstance(prompt, EncodedPrompt)]
        outcomes: list[int | MoepassError] = [prompt if isinstance(prompt, InputError) else -1 for prompt in prompts]
        for row, prompt in enumerate(encoded):
            outcomes[prompt.index] = row
        log_probabilities = np.zeros((len(encoded), len(self.labels)))
        for step in self._steps(encoded):
            result = self.engine.step(
                [encoded[row].labels.request(str(row), encoded[row].tokens) for row in step], compares=False
            )
            refused = dict(result.refused)
            for number, reason in refused.items():
                index = encoded[int(number)].index
                outcomes[index] = InputError(f"{texts[index].name}: {reason}", name=texts[index].name)
            answered = [row for row in step if str(row) not in refused]
            for labels, positions in _by_labels(encoded, answered):
                answers = [result.answers[position] for position in positions]
                log_probabilities[[answered[position] for position in positions]] = labels.log_probabilities(answers)
        if np.isnan(log_probabilities).any():
            row = int(np.isnan(log_probabilities).any(1).argmax())
            name, values = texts[encoded[row].index].name, log_probabilities[row]
            shown = ", ".join(f"{value:g}" for value in values[:3]) + f" and {len(values) - 3} more" * (len(values) > 3)
            text = (
                f"{name}: the log-probabilities of the labels are {shown}, so the model's logits are NaN; its weights "
                "are damaged or overflow their dtype (load the model in float32 to find out which)"
            )
            raise CheckpointError(text, name=name, value=tuple(values.tolist()))
        probabilities, mass = np.zeros_like(log_probabilities), np.zeros(len(encoded))
        for labels, rows in _by_labels(encoded, range(len(encoded))):
            table = score_label_rows(labels.labels, log_probabilities[rows])
            probabilities[rows], mass[rows] = table.probabilities, table.mass
            for row in np.array(rows)[~table.is_possible].tolist():
                name = texts[encoded[row].index].name
                outcomes[encoded[row].index] = ImpossibleLabelsError(f"{name}: {IMPOSSIBLE}", name=name)
        return ScoredWindow(texts, outcomes, probabilities, mass)

    def _steps(self, encoded: Sequence[EncodedPrompt]) -> Iterator[list[int]]:
        """Yield lists of rows of `encoded` that fill a step; tokens that prompts share count once."""
        facts = self.engine.facts
        if facts.form == "trie":
            # Sorting by tokens places prompts with a common prefix next to each other; big-endian bytes sort like them.
            keys = [prompt.tokens.astype(">i4").tobytes() for prompt in encoded]
            order = sorted(range(len(encoded)), key=keys.__getitem__)
        else:
            order = sorted(range(len(encoded)), key=lambda row: -len(encoded[row].tokens))
        step: list[int] = []
        filled, previous = 0, NO_TOKENS
        for row in order:
            tokens = encoded[row].tokens
            added = len(tokens) - (shared_tokens(previous, tokens) if step and facts.form == "trie" else 0)
            added += encoded[row].labels.count
            if step and (filled + added > facts.most_tokens or len(step) >= self._most_texts):
                yield step
                step, filled, added = [], 0, len(tokens) + encoded[row].labels.count
            step.append(row)
            filled += added
            previous = tokens
            if filled >= facts.full_step_tokens:
                yield step
                step, filled = [], 0
        if step:
            yield step


def _raise_first(outcomes: Sequence[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, MoepassError):
            raise outcome


def shared_tokens(left: Tokens, right: Tokens) -> int:
    """Return the number of tokens that both prompts start with."""
    count = min(len(left), len(right))
    differ = np.flatnonzero(left[:count] != right[:count])
    return int(differ[0]) if len(differ) else count


def _by_labels(encoded: Sequence[EncodedPrompt], rows: Sequence[int]) -> Iterator[tuple[LabelPieces, list[int]]]:
    """Yield each `LabelPieces`, with the positions in `rows` of the prompts that use it."""
    groups: dict[int, tuple[LabelPieces, list[int]]] = {}
    for position, row in enumerate(rows):
        labels = encoded[row].labels
        groups.setdefault(id(labels), (labels, []))[1].append(position)
    yield from groups.values()

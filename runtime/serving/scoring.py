"""Score texts against candidate labels with one prefill pass each: nothing is decoded.

Pseudo-code
    each text becomes a prompt; each label is a few tokens after it
    labels of one token need the logits after the prompt: one row of the batch for all of them
    a label of several tokens needs a row of its own, prompt + label without its last token (teacher forcing)
    rows are sorted by length within a window of texts, padded on the right and run in batches
    a label's log-probability is the sum over its tokens; labels compete by softmax over these sums
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from moepass.models.checkpoint.checkpoint_folders import Prompt
from moepass.models.errors import CheckpointError, InputError
from moepass.models.limits import MOST_BATCH_SIZE, MOST_LABELS, check_limit

logger = logging.getLogger("moepass")

# Texts that are sorted by length together, in batches. [Empirical] Padding hardly falls further beyond this.
WINDOW_BATCHES = 16

# (input_ids [rows, tokens], attention_mask [rows, tokens], places [rows, n]) -> logits [rows, n, vocabulary]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Score:
    """The answer for one text. `probabilities` compete among the labels and sum to 1.

    `mass` is what the model gives to all labels together, of everything that it could have said; a label that begins
    with another label is part of that one and counts once.
    """

    label: str
    probabilities: dict[str, float]
    mass: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a batch: `tokens`, and the first of the positions whose logits are read (to the end of the row)."""

    text: int
    context: int
    tokens: tuple[int, ...]
    first_read: int


class LabelSet:
    """Candidate labels as tokens, and the contexts (label tokens that follow the prompt) that their logits need."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str]) -> None:
        """Raises InputError for no labels or too many, a label without tokens, and two labels that are the same."""
        if not labels:
            raise InputError(
                "no labels are given; name at least one candidate answer", name="labels", expected="1 or more"
            )
        check_limit("the number of labels", len(labels), MOST_LABELS, "compare them in several passes")
        self.labels = tuple(labels)
        self.tokens: list[tuple[int, ...]] = []
        for label in self.labels:
            tokens = tuple(_encode(tokenizer, label, f"label {label!r}", special=False))
            if not tokens:
                raise InputError(
                    f"label {label!r} tokenises to nothing; a label needs at least one token", name="label", value=label
                )
            if tokens in self.tokens:
                same = self.labels[self.tokens.index(tokens)]
                raise InputError(
                    f"label {label!r} is given twice"
                    if same == label
                    else f"labels {same!r} and {label!r} are the same tokens; the model cannot tell them apart",
                    name="label",
                    value=label,
                )
            self.tokens.append(tokens)
        stems = sorted({tokens[:-1] for tokens in self.tokens}, key=lambda stem: (len(stem), stem))
        # The logits along a context serve every shorter context that it begins with.
        self.contexts = [stem for stem in stems if not any(_begins(other, stem) for other in stems)]
        self.context_of = [
            next(i for i, context in enumerate(self.contexts) if context[: len(tokens) - 1] == tokens[:-1])
            for tokens in self.tokens
        ]
        self.is_extension = [any(_begins(tokens, other) for other in self.tokens) for tokens in self.tokens]
        self.reads = 1 + max(len(context) for context in self.contexts)
        # The vocabulary entries that are read, and where among them each label's tokens stand.
        self.vocabulary = sorted({token for tokens in self.tokens for token in tokens})
        column = {token: place for place, token in enumerate(self.vocabulary)}
        self.columns = [tuple(column[token] for token in tokens) for tokens in self.tokens]

    def log_probabilities(self, per_context: Sequence[torch.Tensor]) -> list[float]:
        """Each label's log-probability, from the log-probs [reads, len(vocabulary)] along each context."""
        values = [table.tolist() for table in per_context]
        return [
            math.fsum(values[context][place][column] for place, column in enumerate(columns))
            for columns, context in zip(self.columns, self.context_of, strict=True)
        ]


class PromptModel(nn.Module):
    """The logits of a causal language model at chosen positions only; this is the module to compile.

    Takes input_ids and attention_mask [rows, tokens] and places [rows, n], gives logits [rows, n, vocabulary]. Where
    the model is a backbone and an output matrix, that matrix is applied to the chosen positions alone: with a large
    vocabulary the logits of all positions would be the largest tensor by far.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head_apart = _head_is_plain(model)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(input_ids.shape[0], device=input_ids.device)[:, None]
        if self.head_apart:
            hidden = self.model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]
            chosen: torch.Tensor = self.model.get_output_embeddings()(hidden[rows, places])
            return chosen
        logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits[rows, places]


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores texts. `forward` is a `PromptModel`, compiled or not; `device` is where its inputs go."""

    forward: Forward
    tokenizer: PreTrainedTokenizerBase
    prompt: Prompt
    max_tokens: int
    device: torch.device

    @staticmethod
    def of(
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Prompt,
        compile_with: Callable[[nn.Module], Forward] | None = None,
    ) -> Scorer:
        """A scorer of `model`; `compile_with` is given the module to compile, None leaves it as it is."""
        module = PromptModel(model)
        limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30)
        return Scorer(compile_with(module) if compile_with else module, tokenizer, prompt, limit, model.device)

    def labels(self, labels: Sequence[str]) -> LabelSet:
        return LabelSet(self.tokenizer, labels)

    def encode(self, text: str, labels: LabelSet, where: str) -> tuple[int, ...]:
        """The prompt of `text` as tokens. Raises InputError, which names `where`, for a text that cannot be scored."""
        if not text.strip():
            raise InputError(f"{where}: the text is empty", name=where)
        tokens = _encode(self.tokenizer, self.prompt.render(self._cut(text, where)), where, special=True)
        room = self.max_tokens - labels.reads + 1
        if room < 1:
            raise InputError(
                f"the longest label has {labels.reads} tokens, but the model takes at most {self.max_tokens} with the "
                "prompt; shorten the label",
                name="label",
                value=labels.reads,
                expected=self.max_tokens,
            )
        if len(tokens) > room:
            raise InputError(
                f"{where}: the prompt has {len(tokens)} tokens, but the model takes at most {room}"
                + (f" beside the labels' {labels.reads - 1}" if labels.reads > 1 else "")
                + "; shorten the text, or set max_text_tokens in prompt.json to have long texts cut",
                name=where,
                value=len(tokens),
                expected=room,
            )
        return tuple(tokens)

    def score(self, texts: Iterable[str], labels: Sequence[str], batch_size: int = 32) -> Iterator[Score]:
        """The score of each text, in the order of `texts`.

        `batch_size` is in rows: a text takes one, or one for each different beginning of its labels of several tokens.
        Raises InputError before the first score where a text or label cannot be scored, and CheckpointError where the
        model gives no probabilities for a text: its logits hold NaN.
        """
        prepared = self.labels(labels)
        prompts = [self.encode(text, prepared, f"text {number}") for number, text in enumerate(texts, 1)]
        return self.score_prompts(prompts, prepared, batch_size)

    def score_prompts(
        self,
        prompts: Sequence[tuple[int, ...]],
        labels: LabelSet,
        batch_size: int = 32,
        names: Sequence[str] | None = None,
    ) -> Iterator[Score]:
        """As `score`, for prompts that `encode` gave; `names` are what errors call them."""
        if batch_size < 1:
            raise InputError.wrong("batch_size", batch_size, "1 or more")
        check_limit("batch_size", batch_size, MOST_BATCH_SIZE, "no batch of more rows computes faster")
        names = [f"text {number + 1}" for number in range(len(prompts))] if names is None else names
        window = max(1, WINDOW_BATCHES * batch_size // len(labels.contexts))
        for start in range(0, len(prompts), window):
            some = slice(start, start + window)
            yield from self._score_window(prompts[some], labels, batch_size, names[some])

    def _score_window(
        self, prompts: Sequence[tuple[int, ...]], labels: LabelSet, batch_size: int, names: Sequence[str]
    ) -> Iterator[Score]:
        rows = [
            Row(text, number, prompt + context, len(prompt) - 1)
            for text, prompt in enumerate(prompts)
            for number, context in enumerate(labels.contexts)
        ]
        # Longest first: where memory does not suffice, the first batch says so.
        rows.sort(key=lambda row: -len(row.tokens))
        found: dict[tuple[int, int], torch.Tensor] = {}
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            for row, log_probs in zip(batch, self._run(batch, labels), strict=False):
                found[row.text, row.context] = log_probs
        for text, name in enumerate(names):
            yield _decide(labels, [found[text, number] for number in range(len(labels.contexts))], name)

    def _run(self, rows: Sequence[Row], labels: LabelSet) -> Iterator[torch.Tensor]:
        """For each row the log-probs [reads, len(labels.vocabulary)], in fp32 on the CPU.

        Rows and tokens are at least 2, because torch.compile treats sizes 0 and 1 as constants and compiles again.
        """
        height = max(2, len(rows))
        width = max(2, *(len(row.tokens) for row in rows))
        pad = int(self.tokenizer.pad_token_id or 0)  # masked, so that its value is of no matter
        input_ids = torch.full((height, width), pad)
        attention_mask = torch.zeros((height, width), dtype=torch.int64)
        places = torch.zeros((height, labels.reads), dtype=torch.int64)
        for number, row in enumerate(itertools.islice(itertools.cycle(rows), height)):
            length = len(row.tokens)
            input_ids[number, :length] = torch.tensor(row.tokens)
            attention_mask[number, :length] = 1
            places[number] = torch.arange(row.first_read, row.first_read + labels.reads).clamp(max=length - 1)
        inputs = [tensor.to(self.device) for tensor in (input_ids, attention_mask, places)]
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
        for tensor in inputs[:2]:
            # Models that loop over tokens, as recurrent layers without a kernel do, are compiled for each width.
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        with torch.no_grad():
            logits = self.forward(*inputs)
        read = logits.float().log_softmax(-1)[..., torch.tensor(labels.vocabulary, device=self.device)]
        return iter(read.cpu()[: len(rows)])

    def _cut(self, text: str, where: str) -> str:
        limit = self.prompt.max_text_tokens
        # No token is shorter than a quarter of a character (one byte of UTF-8).
        if limit is None or len(text) * 4 <= limit:
            return text
        offsets: Any = _tokenise(self.tokenizer, text, where, special=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        return text if len(offsets) <= limit else text[: int(offsets[limit][0])]


def _decide(labels: LabelSet, per_context: Sequence[torch.Tensor], name: str) -> Score:
    """The answer for the text that `name` names. Raises CheckpointError where the model gives no probabilities."""
    log_probs = labels.log_probabilities(per_context)
    highest = max(log_probs)
    # A label may be impossible, but not all of them. NaN compares as it likes, so it is looked for one by one.
    if any(map(math.isnan, log_probs)):
        raise CheckpointError(
            f"{name}: the log-probabilities of the labels are {_some(log_probs)}, so the model's logits are no numbers "
            "there; its weights are damaged, or too large for their type (load the model in float32 to tell which)",
            name=name,
            value=tuple(log_probs),
        )
    if math.isinf(highest):
        raise CheckpointError(
            f"{name}: the model gives all labels the probability 0, so that they cannot be compared; give labels that "
            "it can say",
            name=name,
        )
    weights = [math.exp(value - highest) for value in log_probs]
    total = math.fsum(weights)
    probabilities = {label: weight / total for label, weight in zip(labels.labels, weights, strict=True)}
    own = (value for value, extends in zip(log_probs, labels.is_extension, strict=True) if not extends)
    return Score(labels.labels[log_probs.index(highest)], probabilities, math.fsum(map(math.exp, own)))


def _some(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:3])
    return f"{shown} and {len(values) - 3} more" if len(values) > 3 else shown


def _begins(longer: tuple[int, ...], shorter: tuple[int, ...]) -> bool:
    return len(longer) > len(shorter) and longer[: len(shorter)] == shorter


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, where: str, *, special: bool) -> list[int]:
    ids: list[int] = _tokenise(tokenizer, text, where, special=special)["input_ids"]
    return ids


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str, where: str, *, special: bool, **options: bool) -> Any:
    try:
        # verbose=False: the limit that it would warn about is checked here, with an error.
        return tokenizer(text, add_special_tokens=special, verbose=False, **options)
    except TypeError as error:  # half a surrogate pair is a str for Python, but no text
        raise InputError(f"{where}: {text[:40]!r} is no valid Unicode text", name=where, value=text) from error


class _States(BaseModelOutput):  # type: ignore[misc]  # transformers has no types
    """The output of a backbone: its last states, and nothing else that a model may look for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _GivenStates(nn.Module):
    """Stands in for a backbone: returns `states` for any input, and otherwise has the backbone's attributes."""

    def __init__(self, backbone: nn.Module, states: torch.Tensor) -> None:
        super().__init__()
        self.__dict__["backbone"] = backbone  # not as a child
        self.states = states

    def forward(self, *args: object, **kwargs: object) -> _States:
        return _States(last_hidden_state=self.states)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["backbone"], name)


@torch.no_grad()
def _head_is_plain(model: PreTrainedModel) -> bool:
    """True where the output matrix on the backbone's states gives the model's own logits, to the bit.

    Tried on random states: families scale, cap or project logits in ways that no attribute announces. The backbone,
    whose experts may have to be streamed from other ranks, does not run.
    """
    head, backbone = model.get_output_embeddings(), model.base_model
    weight = getattr(head, "weight", None)
    if head is None or weight is None or backbone is not model._modules.get(model.base_model_prefix):
        return False
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 3, weight.shape[-1], generator=generator).to(weight.device, weight.dtype)
    # The model with another backbone; the model itself stays as it is, for threads that run it.
    probe = copy.copy(model)
    probe.__dict__["_modules"] = {**model._modules, model.base_model_prefix: _GivenStates(backbone, states)}
    try:
        logits = probe(input_ids=torch.tensor([[1, 0, 1]], device=weight.device), use_cache=False).logits
    except (TypeError, AttributeError, IndexError) as error:
        logger.info(
            "logits are computed for every token: %s needs more of its backbone than states (%s: %s)",
            type(model).__name__,
            type(error).__name__,
            error,
        )
        return False
    return torch.equal(logits, head(states))

"""Rendered prompts from the texts of users, by the checkpoint's chat template or else by its `prompt.json`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moepass.models.checkpoint.checkpoint_folders import Prompt
from moepass.models.errors import CheckpointError, InputError
from moepass.models.limits import MOST_CHARACTERS_PER_TOKEN, check_limit
from moepass.runtime.serving.questions.text_encoding import TextCut, TextEncoder
from moepass.runtime.serving.questions.token_texts import TokenTexts
from moepass.runtime.serving.requests.request import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A text with more than this number of characters per token of its limit is cut by characters before it is encoded.
_CHARACTERS_PER_CUT_TOKEN = 16
# A text behind control tokens may take up to this number of tokens less than alone, because some tokenizers add a blank
# before the first word.
_BORDER_TOKENS = 4
# Templates in use take less than a millisecond. [Empirical]
RENDER_SECONDS = 5.0


class RenderTimeoutError(InputError):
    """A template did not finish within its `expected` seconds."""


class _Expired(BaseException):
    """Raised inside the code that takes too long; `except Exception` in a template does not catch it."""


class RenderLimit:
    """Interrupts blocks of pure Python that take longer than `seconds`, in any thread. One thread watches all.

    Chat templates come with checkpoints, and one that loops must not block the server.
    """

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}  # by thread
        self._is_watched = False

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Run the block with the time limit, and raise RenderTimeoutError if it expires."""
        thread = threading.get_ident()
        try:
            try:
                with self._lock:
                    self._deadlines[thread] = time.monotonic() + self.seconds
                    if not self._is_watched:
                        self._is_watched = True
                        threading.Thread(target=self._watch, daemon=True).start()
                yield
            finally:
                with self._lock:
                    self._deadlines.pop(thread, None)
        except _Expired:
            text = (
                f"the chat template did not finish within {self.seconds:g} s; check it for a loop, or send shorter "
                "messages"
            )
            raise RenderTimeoutError(text, name="chat_template", expected=self.seconds) from None

    def _watch(self) -> None:
        while True:
            time.sleep(self.seconds / 4)
            with self._lock:
                if not self._deadlines:  # the next limited block starts a new thread
                    self._is_watched = False
                    return
                for thread, deadline in list(self._deadlines.items()):
                    if time.monotonic() > deadline:
                        del self._deadlines[thread]
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Expired))


class PromptWriter:
    """Renders and encodes the prompts of one checkpoint, for a model that takes `most_tokens` tokens.

    With `takes_chat`, prompts are rendered by the tokenizer's chat template if it has one, otherwise by `prompt`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, most_tokens: int, *, takes_chat: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.takes_chat = takes_chat
        self.prompt = prompt
        self.most_tokens = most_tokens
        self.encoder = TextEncoder(tokenizer)
        self.token_texts = TokenTexts(tokenizer)
        self.render_limit = RenderLimit()

    @property
    def has_chat_template(self) -> bool:
        """True if prompts are rendered by a chat template."""
        return self.takes_chat and bool(self.tokenizer.chat_template)

    @property
    def labels_by_name(self) -> dict[str, str]:
        """The labels of `prompt.json`, by themselves and by their names; empty if there is a chat template."""
        if self.has_chat_template:
            return {}
        names = {name: label for label, name in self.prompt.label_names.items()}
        return names | {label: label for label in self.prompt.labels}

    def check(self) -> None:
        """Raise CheckpointError if the template fails, or omits the text.

        A server checks this before it is ready, because a wrong template produces bad scores without an error.
        """
        probe = "Is 7 a number?"
        try:
            rendered = self.ask(probe)
            self.encode([rendered])
        except InputError as error:
            raise CheckpointError(f"this checkpoint's template fails: {error}", name="chat_template") from error
        if probe not in rendered:
            text = (
                f"this checkpoint's template omits the text: it renders {probe!r} as {rendered[:200]!r}; correct its "
                "chat_template or prompt.json"
            )
            raise CheckpointError(text, name="chat_template", value=rendered[:200], expected=probe)

    def check_length(self, text: str, name: str) -> None:
        """Raise TooLargeError if the text has too many characters to fit, without encoding it."""
        advice = f"the model takes {self.most_tokens} tokens; send a shorter text"
        most = MOST_CHARACTERS_PER_TOKEN * self.most_tokens
        check_limit(f"the length of {name} in characters", len(text), most, advice, name=name)

    def ask(self, text: str, name: str = "the text") -> str:
        """Return the prompt for `text` as its only message or `{text}`, cut to `max_text_tokens` of prompt.json."""
        if self._cut_tokens is not None:
            text = self.encoder.cut(text, self._cut_tokens)
        return self.render(text, name)

    def render(self, text: str, name: str = "the text") -> str:
        """Return the prompt for `text` without cutting the text."""
        self.check_length(text, name)
        if self.has_chat_template:
            return self.chat([{"role": "user", "content": text}])
        return self.prompt.render(self.encoder.shield(text))

    def encode_texts(self, texts: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[Tokens]]:
        """Return the prompts for many texts, as `ask` renders them, and their tokens. Raise InputError if one fails."""
        limit = self._cut_tokens
        if limit is None:
            rendered = [self.render(text, name) for text, name in zip(texts, names, strict=True)]
            return rendered, self.encode(rendered)
        # Long texts are cut by characters first, so that they are not encoded in full.
        short = [text[: _CHARACTERS_PER_CUT_TOKEN * limit] for text in texts]
        rendered = [self.render(text, name) for text, name in zip(short, names, strict=True)]
        encoded = self.encode(rendered)
        before, _, after = self.prompt.template.partition("{text}")
        uncertain = list(range(len(texts)))
        # If control tokens, or nothing, stand on both sides of the text, its tokens do not depend on the template.
        if not self.encoder.context_of(before) and self.encoder.begins_with_control_token(after):
            template_tokens = len(self.encode([self.prompt.render("")])[0])
            uncertain = [
                number
                for number, tokens in enumerate(encoded)
                if len(tokens) - template_tokens > limit - _BORDER_TOKENS or len(short[number]) < len(texts[number])
            ]
        for number in uncertain:
            cut = self.ask(texts[number], names[number])
            if cut != rendered[number]:
                rendered[number] = cut
                (encoded[number],) = self.encode([cut])
        return rendered, encoded

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """Return the prompt of messages, each with `role`, `content` and maybe `name`.

        `options` are variables of the template. Raises InputError if there is no chat template, it raises an error, or
        it takes too long.
        """
        if not self.has_chat_template:
            text = "this checkpoint has no chat template, so it takes no messages; send a text to /v1/completions"
            raise InputError(text, name="messages")
        for number, message in enumerate(messages):
            self.check_length(message["content"], f"messages[{number}].content")
        shielded = [
            {key: value if key == "role" else self.encoder.shield(value) for key, value in message.items()}
            for message in messages
        ]
        options = {"add_generation_prompt": True, "enable_thinking": False, **options}
        try:
            with self.render_limit.limited():
                rendered: str = self.tokenizer.apply_chat_template(shielded, tokenize=False, **options)
        except RenderTimeoutError:
            raise
        except Exception as error:  # templates raise any exception, such as "roles must alternate"
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"the chat template refuses these messages: {reason}", name="messages") from error
        return rendered

    def plain(self, text: str, name: str = "the text") -> str:
        """Return the shielded text without a template."""
        self.check_length(text, name)
        return self.encoder.shield(text)

    def encode(self, rendered: Sequence[str]) -> list[Tokens]:
        """Return the tokens of rendered prompts, with the tokenizer's special ones unless a chat template has them."""
        return self.encoder.encode_all(rendered, add_special=not self.has_chat_template)

    def encode_plain(
        self,
        texts: Sequence[str],
        *,
        add_special: bool = True,
        name: str = "the text",
        cut: TextCut | None = None,
        prefix: str = "",
    ) -> list[Tokens]:
        """Return the tokens of texts without a template, behind `prefix`, a text of the checkpoint."""
        if cut is not None:
            return self._encode_cut([(text,) for text in texts], (name,), cut, add_special=add_special, prefix=prefix)
        return self.encoder.encode_all([prefix + self.plain(text, name) for text in texts], add_special=add_special)

    def render_pair(self, query: str, document: str, names: tuple[str, str], instruction: str | None = None) -> str:
        """Return `pair_template`, which must be set, with these texts."""
        texts = self.plain(query, names[0]), self.plain(document, names[1])
        return self.prompt.render_pair(*texts, None if instruction is None else self.plain(instruction, "instruction"))

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        names: tuple[str, str] = ("query", "document"),
        *,
        instruction: str | None = None,
        cut: TextCut | None = None,
    ) -> list[Tokens]:
        """Return the tokens of pairs of texts, joined by the checkpoint's `pair_template` or else by its tokenizer.

        `cut` shortens the documents of a template, and the longer text of a pair that the tokenizer joins.
        """
        if self.prompt.pair_template is not None:

            def render(query: str, document: str) -> str:
                return self.render_pair(query, document, names, instruction)

            return self.encode([render(*pair) for pair in self.fit_documents(pairs, names[1], cut, render)])
        if cut is not None:
            return self._encode_cut(pairs, names, cut)
        return self.encoder.encode_pairs([(self.plain(a, names[0]), self.plain(b, names[1])) for a, b in pairs])

    def fit_documents(
        self,
        pairs: Sequence[tuple[str, str]],
        name: str,
        cut: TextCut | None,
        render: Callable[[str, str], str],
        labels: Sequence[str] = (),
    ) -> list[tuple[str, str]]:
        """Return `pairs` with documents that `cut` has shortened, so that `render(*pair)` fits; without cut, all."""
        if cut is None:
            return list(pairs)
        return [
            (query, self.fit(document, cut, name, functools.partial(render, query), labels))
            for query, document in pairs
        ]

    def fit(
        self,
        text: str,
        cut: TextCut,
        name: str = "the text",
        render: Callable[[str], str] | None = None,
        labels: Sequence[str] = (),
    ) -> str:
        """Return the part of `text` with which the prompt `render(text)`, or the text alone, fits into `cut`.

        The prompt and the longest of `labels` behind it also fit into the model. Raises InputError if the rest of the
        prompt leaves no room for the text.
        """
        most = cut.most_tokens
        if labels:
            most = min(most, self.most_tokens - max(len(self.encoder.encode(label)) for label in labels))
        room = most
        while room > 0:
            part = self.encoder.cut(text, room, cut.side)
            if render is None:
                tokens = self.encoder.encode(self.encoder.shield(part))
            else:
                (tokens,) = self.encode([render(part)])
            if len(tokens) <= most:
                return part
            room -= len(tokens) - most
        problem = (
            f"{cut.name} limits prompts to {most} tokens, and the prompt without {name} has more; shorten the other "
            "texts, or allow more tokens"
        )
        raise InputError(problem, name=cut.name, value=most)

    def _encode_cut(
        self,
        texts: Sequence[tuple[str, ...]],
        names: tuple[str, ...],
        cut: TextCut,
        *,
        add_special: bool = True,
        prefix: str = "",
    ) -> list[Tokens]:
        # A longer text than the model could take is cut by characters first, so that it is not encoded in full.
        most = MOST_CHARACTERS_PER_TOKEN * self.most_tokens
        shortened = [[text[:most] if cut.side == "right" else text[-most:] for text in group] for group in texts]
        shielded = [tuple(prefix + self.encoder.shield(text) for text in group) for group in shortened]
        encoded = self.encoder.encode_cut(shielded, cut, add_special=add_special)
        for group, tokens in zip(texts, encoded, strict=True):
            if len(tokens) < cut.most_tokens:  # no tokens were cut, so no characters may have been cut
                for text, name in zip(group, names, strict=True):
                    self.check_length(text, name)
        return encoded

    def needs_blank_before_label(self, rendered: str) -> bool:
        """Return True if the prompt ends within a line of text, so that the answer starts with a space."""
        context = self.encoder.context_of(rendered)
        return bool(context) and not context[-1].isspace()

    @property
    def _cut_tokens(self) -> int | None:
        """The number of tokens that texts are cut to, or None. Conversations are not cut."""
        return None if self.has_chat_template else self.prompt.max_text_tokens

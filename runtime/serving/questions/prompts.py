"""What users write becomes rendered prompts: by the checkpoint's chat template where it has one, else by its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moepass.models.checkpoint.checkpoint_folders import Prompt
from moepass.models.errors import CheckpointError, InputError
from moepass.models.limits import MOST_CHARACTERS_PER_TOKEN, check_limit
from moepass.runtime.serving.questions.render_limit import RenderLimit, RenderTimeoutError
from moepass.runtime.serving.questions.text_encoding import TextEncoder
from moepass.runtime.serving.requests.request import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A text of so many characters for each token that it is cut to is cut before it is encoded whole.
_TRIED_CHARACTERS = 16
# A text behind control tokens may take so many tokens less than alone: a tokenizer may put a blank before its first.
_BORDER_TOKENS = 4


class PromptWriter:
    """Renders and encodes prompts of one checkpoint; `most_tokens` is what its model takes.

    `takes_chat` False: the checkpoint's chat template is not used, as if it had none.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, most_tokens: int, *, takes_chat: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.takes_chat = takes_chat
        self.prompt = prompt
        self.most_tokens = most_tokens
        self.encoder = TextEncoder(tokenizer)
        self.render_limit = RenderLimit()

    @property
    def has_chat_template(self) -> bool:
        return self.takes_chat and bool(self.tokenizer.chat_template)

    @property
    def called_labels(self) -> dict[str, str]:
        """Labels of the checkpoint's prompt by what they may be called: themselves, and their names."""
        if self.has_chat_template:
            return {}
        names = {name: label for label, name in self.prompt.label_names.items()}
        return names | {label: label for label in self.prompt.labels}

    def check(self) -> None:
        """Raises CheckpointError where prompts of this checkpoint cannot be made, or leave out what is asked.

        For the start of a server: a wrong template must not show as scores that are bad without a word.
        """
        probe = "Is 7 a number?"
        try:
            rendered = self.ask(probe)
            self.encode([rendered])
        except InputError as error:
            raise CheckpointError(f"this checkpoint makes no prompt: {error}", name="chat_template") from error
        if probe not in rendered:
            raise CheckpointError(
                f"this checkpoint's template leaves out the text: of {probe!r} it makes {rendered[:200]!r}",
                name="chat_template",
                value=rendered[:200],
                expected=probe,
            )

    def check_length(self, text: str, name: str) -> None:
        """Raises TooLargeError for a text that cannot fit, without making tokens of it."""
        advice = f"the model takes {self.most_tokens} tokens; send a shorter text"
        check_limit(f"the length of {name} in characters", len(text), self._most_characters, advice, name=name)

    def ask(self, text: str, name: str = "the text") -> str:
        """The prompt that asks `text`, all of which the user wrote: its only message, or `{text}` of the prompt."""
        if self._cut_tokens is not None:
            text = self.encoder.cut(text, self._cut_tokens)
        return self.render(text, name)

    def render(self, text: str, name: str = "the text") -> str:
        """As `ask`, of a text that is not cut."""
        self.check_length(text, name)
        if self.has_chat_template:
            return self.chat([{"role": "user", "content": text}])
        return self.prompt.render(self.encoder.shield(text))

    def encode_texts(self, texts: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[Tokens]]:
        """Many prompts, as `ask` renders them, and their tokens. Raises InputError where one of them cannot be made."""
        most = self._cut_tokens
        if most is None:
            rendered = [self.render(text, name) for text, name in zip(texts, names, strict=True)]
            return rendered, self.encode(rendered)
        # Longer texts are cut before they are encoded whole.
        short = [text[: _TRIED_CHARACTERS * most] for text in texts]
        rendered = [self.render(text, name) for text, name in zip(short, names, strict=True)]
        encoded = self.encode(rendered)
        if not self._text_stands_apart:
            doubtful = list(range(len(texts)))
        else:
            around = len(self.encode([self.prompt.render("")])[0])
            doubtful = [
                number
                for number, tokens in enumerate(encoded)
                if len(tokens) - around > most - _BORDER_TOKENS or len(short[number]) < len(texts[number])
            ]
        for number in doubtful:
            cut = self.ask(texts[number], names[number])
            if cut != rendered[number]:
                rendered[number] = cut
                (encoded[number],) = self.encode([cut])
        return rendered, encoded

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The prompt of a conversation. Raises InputError where there is no chat template, or it refuses."""
        if not self.has_chat_template:
            raise InputError(
                "this checkpoint has no chat template, so that it takes no messages; send a text", name="messages"
            )
        for number, message in enumerate(messages):
            self.check_length(message["content"], f"messages[{number}].content")
        shielded = [{**message, "content": self.encoder.shield(message["content"])} for message in messages]
        options = {"add_generation_prompt": True, "enable_thinking": False, **options}
        try:
            with self.render_limit.limited():
                rendered: str = self.tokenizer.apply_chat_template(shielded, tokenize=False, **options)
        except RenderTimeoutError:
            raise
        except Exception as error:  # templates raise what they like, as "roles must alternate"
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"the chat template refuses these messages: {reason}", name="messages") from error
        return rendered

    def plain(self, text: str, name: str = "the text") -> str:
        """The text alone, without a template."""
        self.check_length(text, name)
        return self.encoder.shield(text)

    def encode(self, rendered: Sequence[str]) -> list[Tokens]:
        """The tokens of rendered prompts. Chat templates bring all special tokens; else the tokenizer adds its own."""
        return self.encoder.encode_all(rendered, add_special=not self.has_chat_template)

    def encode_plain(self, texts: Sequence[str], *, add_special: bool = True, name: str = "the text") -> list[Tokens]:
        """The tokens of texts without a template."""
        return self.encoder.encode_all([self.plain(text, name) for text in texts], add_special=add_special)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], names: tuple[str, str] = ("query", "document")
    ) -> list[Tokens]:
        """The tokens of pairs of texts, by the checkpoint's `pair_template`, or as its tokenizer joins them."""
        texts = [(self.plain(query, names[0]), self.plain(document, names[1])) for query, document in pairs]
        if self.prompt.pair_template is not None:
            return self.encode([self.prompt.render_pair(*pair) for pair in texts])
        return self.encoder.encode_pairs(texts)

    def asks_before_blank(self, rendered: str) -> bool:
        """True where an answer behind this prompt begins with a blank: the prompt ends within a line of text."""
        context = self.encoder.context_of(rendered)
        return bool(context) and not context[-1].isspace()

    @property
    def _cut_tokens(self) -> int | None:
        """Texts are cut to so many tokens; a conversation is not."""
        return None if self.has_chat_template else self.prompt.max_text_tokens

    @property
    def _text_stands_apart(self) -> bool:
        """True where the template has control tokens, or nothing, on both sides of the text."""
        before, _, behind = self.prompt.template.partition("{text}")
        return not self.encoder.context_of(before) and self.encoder.begins_with_control_token(behind)

    @property
    def _most_characters(self) -> int:
        return MOST_CHARACTERS_PER_TOKEN * self.most_tokens

"""Tokens as text, and a unique name of each token for lists of log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """The texts of one tokenizer's tokens; with `as_ids`, tokens are named by their ids, such as `token_id:123`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._vocabulary_size = len(tokenizer)
        self.name = functools.cache(self._name)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a model's output."""
        end = self._tokenizer.eos_token_id
        return frozenset() if end is None else frozenset({int(end)})

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, control tokens included."""
        # A model may have more output rows than its tokenizer has tokens.
        named = [token for token in tokens if token < self._vocabulary_size]
        text: str = self._tokenizer.decode(named, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def utf8(self, token: int) -> list[int] | None:
        """Return the UTF-8 bytes of a token's text, or None if it is a part of a character."""
        text = self.text([token])
        return None if "\ufffd" in text else list(text.encode())

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        text = self.text([token])
        # All parts of characters decode to U+FFFD. As keys of a table of log-probabilities they would collide.
        if text and "\ufffd" not in text:
            return text
        piece = self._tokenizer.convert_ids_to_tokens(token) if token < self._vocabulary_size else None
        return piece or f"token_id:{token}"

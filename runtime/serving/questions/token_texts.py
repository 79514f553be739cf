"""Tokens become text again: what they say, and a name of each for lists of log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """Texts of tokens of one tokenizer; with `as_ids` the name of a token is its id, as `token_id:123`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._vocabulary_size = len(tokenizer)
        self.name = functools.cache(self._name)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end what a model says."""
        end = self._tokenizer.eos_token_id
        return frozenset() if end is None else frozenset({int(end)})

    def text(self, tokens: Sequence[int]) -> str:
        """What the tokens say together, control tokens included."""
        known = [token for token in tokens if token < self._vocabulary_size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def utf8(self, token: int) -> list[int] | None:
        """The bytes of a token's text, None where it is a part of a character."""
        text = self.text([token])
        return None if "\ufffd" in text else list(text.encode())

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        text = self.text([token])
        # Parts of characters all decode alike, and tables of log-probabilities would lose all but one of them.
        # Models have more rows than their tokenizer has tokens.
        if text and "\ufffd" not in text:
            return text
        piece = self._tokenizer.convert_ids_to_tokens(token) if token < self._vocabulary_size else None
        return piece or f"token_id:{token}"

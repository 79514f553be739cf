"""Tokens as text: their names in answers, their bytes, and the characters of a text at which they begin."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The vocabulary entry of a byte in tokenizers with byte fallback, and the mark of a blank in those of SentencePiece.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\u2581"


class TokenTexts:
    """The texts of one tokenizer's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend: Any = tokenizer.backend_tokenizer
        self._tokenizer, self._backend = tokenizer, backend
        self._vocabulary_size = len(tokenizer)
        self._added = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}
        decoder = None if backend.decoder is None else msgspec.json.decode(backend.decoder.__getstate__())
        self._decoders = frozenset(_kinds(decoder or {}))
        self.utf8 = functools.cache(self._utf8)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a model's output."""
        end = self._tokenizer.eos_token_id
        return frozenset() if end is None else frozenset({int(end)})

    def text(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of the tokens, with the names of special tokens unless `skip_special`."""
        # A model may have more output rows than its tokenizer has tokens.
        named = [token for token in tokens if token < self._vocabulary_size]
        text: str = self._tokenizer.decode(named, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return text

    def name(self, token: int) -> str:
        r"""Return the text of a token, with the blank that it starts with, if any.

        A part of a character is named by its bytes, such as `bytes:\xd6`, as in OpenAI's API, and a token without text
        by its id, such as `token_id:123`. So tokens that differ have different names, except if their texts are equal.
        """
        piece = self.utf8(token)
        if not piece:
            return self.name_as_id(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    @staticmethod
    def name_as_id(token: int) -> str:
        """Return the id of a token as a name, such as `token_id:123`."""
        return f"token_id:{token}"

    def _utf8(self, token: int) -> bytes | None:
        """Return the bytes of a token within a text, or None if the tokenizer has no such token."""
        if token in self._added:
            return self._added[token].encode()
        entry = self._tokenizer.convert_ids_to_tokens(token) if token < self._vocabulary_size else None
        if entry is None:
            return None
        if "ByteLevel" in self._decoders:
            return b"".join(_bytes_by_character().get(character, character.encode()) for character in entry)
        if "ByteFallback" in self._decoders and (match := _BYTE.fullmatch(entry)):
            return bytes([int(match[1], 16)])
        if self._decoders & {"Replace", "Metaspace"}:
            return str(entry.replace(_BLANK, " ")).encode()
        return self.text([token]).encode()

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """Return the characters at which the tokens of `text` begin.

        All parts of a character begin at that character. Tokens that are not in the text, such as one for its
        beginning, begin where the next token does.
        """
        pieces = [self.utf8(token) or b"" for token in tokens]
        joined, encoded = b"".join(pieces), text.encode()
        # Tokenizers add tokens around the text, and those of SentencePiece a blank in front of it.
        added = len(joined) - len(encoded) if joined.endswith(encoded) else joined.find(encoded)
        if added < 0:
            # The tokenizer changes this text before it encodes it, but knows where its tokens come from.
            for add_special in (True, False):
                encoding = self._backend.encode(text, add_special_tokens=add_special)
                if encoding.ids == [*tokens]:
                    return [start for start, _ in encoding.offsets]
        ends = np.cumsum([0, *map(len, pieces)])
        starts = np.clip(ends[:-1] - max(0, added), 0, len(encoded))
        begins_character = (np.frombuffer(encoded, np.uint8) & 0xC0) != 0x80
        # The character of each byte, and of the end.
        characters = np.append(np.cumsum(begins_character) - 1, len(text))
        offsets: list[int] = characters[starts].tolist()
        return offsets


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types of a decoder of `tokenizers` and of its parts."""
    yield decoder.get("type", "")
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


@functools.cache
def _bytes_by_character() -> Mapping[str, bytes]:
    """Return the bytes that the characters in vocabularies of byte-level tokenizers stand for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: bytes([byte]) for byte, character in bytes_to_unicode().items()}

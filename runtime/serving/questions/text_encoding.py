"""Text becomes tokens, so that what a user wrote never becomes a control token of the model.

Control tokens (special ones, and those that look like tags) are renamed in a copy of the tokenizer, to names that
nobody can guess. A prompt is rendered with the user's text *shielded*: a mark is put inside whatever looks like a
control token. Then the control tokens of the rendered prompt are those of the template; they are replaced by their
new names, the marks are removed, and the text is encoded in one go. So the tokens are those of the whole text, and
where the user's text holds no control tokens, they are the original tokenizer's own.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer

from moepass.models.errors import InputError
from moepass.runtime.serving.requests.request import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Characters of two planes of Unicode that are for private use: no text has them, and no normaliser changes them.
_PRIVATE, _NAMES = 0xF0000, 0x100000
_TAG = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
# Prompts are encoded from near the end of what they share where that saves so many characters. [Empirical]
_KEPT_CHARACTERS, _SAVED_CHARACTERS = 256, 4096


class TextEncoder:
    """Encodes rendered prompts; see the module. Safe to use from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        original: Any = tokenizer.backend_tokenizer
        description: dict[str, Any] = msgspec.json.decode(original.to_str())
        added: list[dict[str, Any]] = description["added_tokens"]
        control = [token for token in added if _is_control(token)]
        description["added_tokens"] = [token for token in added if not _is_control(token)]
        self._mark = "".join(chr(_PRIVATE + secrets.randbelow(0xFFF0)) for _ in range(6))
        names = {token["content"]: self._mark + chr(_NAMES + number) for number, token in enumerate(control)}
        self._names = names
        self._renamed: Any = Tokenizer.from_str(msgspec.json.encode(description).decode())
        self._renamed.no_truncation()
        self._renamed.no_padding()
        self._renamed.add_special_tokens(
            [
                AddedToken(
                    names[token["content"]],
                    single_word=token["single_word"],
                    lstrip=token["lstrip"],
                    rstrip=token["rstrip"],
                    normalized=False,
                )
                for token in control
            ]
        )
        # Longest first: of control tokens that begin alike, the longer one is meant.
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # Added tokens are numbered anew, where the vocabulary itself does not hold them.
        self._ids = np.arange(1 + max(self._renamed.get_vocab().values()), dtype=np.int32)
        for token in added:
            here = self._renamed.token_to_id(names.get(token["content"], token["content"]))
            self._ids[here] = token["id"]
        self._control_ids = {token["id"]: str(token["content"]) for token in control}
        self._original = original
        model = description["model"]
        # What no token fits is unknown, and that says nothing about what the text holds.
        unknown = {model.get("unk_id"), original.token_to_id(model.get("unk_token") or "")}
        # Control tokens are those of the template by their new names; by their own, the model itself made them of text.
        self._is_forged = np.isin(self._ids, [*(self._control_ids.keys() - unknown)])
        for name in names.values():
            self._is_forged[self._renamed.token_to_id(name)] = False

    @property
    def control_tokens(self) -> dict[int, str]:
        """The control tokens by their ids."""
        return dict(self._control_ids)

    def shield(self, text: str) -> str:
        """`text` of a user, to be put into a template: what looks like control tokens in it stays text."""
        while self._pattern.search(text):  # again, because one may overlap the next
            text = self._pattern.sub(lambda found: found[0][0] + self._mark + found[0][1:], text)
        return text

    def encode(self, rendered: str, *, add_special: bool = False) -> Tokens:
        """The tokens of a rendered prompt; with `add_special` those that the tokenizer puts around it, too.

        Raises InputError for text that is no Unicode, and where a control token would come out of a user's text.
        """
        return self.encode_all([rendered], add_special=add_special)[0]

    def encode_all(self, rendered: Sequence[str], *, add_special: bool = False) -> list[Tokens]:
        """As `encode`, for several prompts. What long ones share at their beginning is encoded once."""
        shared = _shared_start(rendered) if len(rendered) > 2 else ""
        if (len(shared) - _KEPT_CHARACTERS) * (len(rendered) - 3) < _SAVED_CHARACTERS:
            return self._encode_batch(rendered, add_special)
        first, last = self._encode_batch([rendered[0], rendered[-1]], add_special)
        cut = self._cut_of(rendered[0], len(shared) - _KEPT_CHARACTERS, add_special)
        if cut is None:
            return self._encode_batch(rendered, add_special)
        character, token = cut
        ends = self._encode_batch([text[character:] for text in rendered], False)
        wholes = [np.concatenate((first[:token], end)) for end in ends]
        # Tokenizers split text into words from left to right, so that one may begin anew at a word. Where one does
        # not, or puts tokens behind the text, it shows here.
        if np.array_equal(wholes[0], first) and np.array_equal(wholes[-1], last):
            return wholes
        return self._encode_batch(rendered, add_special)

    def encode_pairs(self, rendered: Sequence[tuple[str, str]]) -> list[Tokens]:
        """The tokens of pairs of texts, joined as the tokenizer joins pairs."""
        named = [(self._named(first), self._named(second)) for first, second in rendered]
        return self._original_ids(self._batch(named, True))

    def names(self, tokens: Sequence[int]) -> list[str]:
        """The entries of the vocabulary, as they stand there."""
        return [str(self._original.id_to_token(token)) for token in tokens]

    def cut(self, text: str, most_tokens: int) -> str:
        """`text` of a user without what comes behind its first `most_tokens` tokens."""
        tried = 16 * most_tokens
        while True:
            start = text[:tried]
            offsets = self._batch([self._named(self.shield(start))], False)[0].offsets
            # One token more might be another one in the whole text; twice as many are enough to tell.
            if len(offsets) > 2 * most_tokens or (len(offsets) > most_tokens and len(start) == len(text)):
                return text[: offsets[most_tokens][0]]
            if len(start) == len(text):
                return text
            tried *= 4

    def context_of(self, rendered: str) -> str:
        """The end of a rendered prompt, as much as decides how a label behind it is tokenised.

        What stands before a control token does not, and no word reaches over a line's beginning.
        """
        tail = self._pattern.split(rendered)[-1]
        words = tail[-_KEPT_CHARACTERS:]
        return words if len(words) == len(tail) else words[words.find(" ") + 1 :]

    def begins_with_control_token(self, rendered: str) -> bool:
        """True of an empty text, too."""
        return not rendered or self._pattern.match(rendered) is not None

    def _named(self, rendered: str) -> str:
        """`rendered` with the template's control tokens by their new names, and the user's text as it was."""
        found = self._pattern.findall(rendered)
        if not found:
            return rendered.replace(self._mark, "")
        plain = [part.replace(self._mark, "") for part in self._pattern.split(rendered)]
        return plain[0] + "".join(self._names[name] + part for name, part in zip(found, plain[1:], strict=True))

    def _cut_of(self, rendered: str, before: int, add_special: bool) -> tuple[int, int] | None:
        """A place of `rendered` where a word begins, at most `before`: its character, and its token."""
        start = max(rendered.rfind("\n", 0, before), rendered.rfind(" ", 0, before))
        return None if start <= 0 else (start, len(self._encode_batch([rendered[:start]], add_special)[0]))

    def _batch(self, named: Sequence[str] | Sequence[tuple[str, str]], add_special: bool) -> Any:
        try:
            return self._renamed.encode_batch(list(named), add_special_tokens=add_special)
        except (TypeError, UnicodeError) as error:  # half a surrogate pair is a str for Python, but no text
            raise InputError("the text is no valid Unicode: it holds half of a surrogate pair", name="text") from error

    def _encode_batch(self, rendered: Sequence[str], add_special: bool) -> list[Tokens]:
        return self._original_ids(self._batch([*map(self._named, rendered)], add_special))

    def _original_ids(self, encodings: Sequence[Any]) -> list[Tokens]:
        """The tokens of each. Many texts are short, so arrays are made of all of them at once."""
        own = [encoding.ids for encoding in encodings]
        here = np.fromiter(itertools.chain.from_iterable(own), np.int32)
        ids: Tokens = self._ids[here]
        forged = self._is_forged[here]
        if forged.any():
            # Those that the tokenizer puts around the text are meant.
            masks = itertools.chain.from_iterable(encoding.special_tokens_mask for encoding in encodings)
            forged &= np.fromiter(masks, np.int32) == 0
            if forged.any():
                content = self._control_ids[int(ids[forged][0])]
                raise InputError(
                    f"the text holds {content!r}, which this tokenizer reads as a control token wherever it stands; "
                    "leave it out",
                    name="text",
                    value=content,
                )
        ends = [0, *itertools.accumulate(map(len, own))]
        return [ids[start:end] for start, end in itertools.pairwise(ends)]


def _shared_start(texts: Sequence[str]) -> str:
    # What the first and the last in alphabetical order share, all share.
    first, last = min(texts), max(texts)
    length = next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    return first if length is None else first[:length]


def _is_control(token: dict[str, Any]) -> bool:
    # Others are words, or runs of blanks, that a vocabulary was extended with.
    content = token["content"]
    return len(content) > 1 and bool(token["special"] or _TAG.fullmatch(content))

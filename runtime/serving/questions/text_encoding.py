"""Encoding of text in which a user's text never becomes a control token of the model.

In a copy of the tokenizer, control tokens (special ones, and tokens that look like tags) get new random names. A
prompt is rendered with the user's text *shielded*: a mark is inserted into each substring that looks like a control
token. So the rendered prompt contains only the template's control tokens. They are replaced by their new names, the
marks are removed, and the whole text is encoded at once. If the user's text contains no control tokens, the result
equals the original tokenizer's.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer

from moepass.models.errors import InputError
from moepass.runtime.serving.requests.request import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Two Unicode planes for private use. Texts do not use them, and normalisers do not change them.
_PRIVATE, _NAMES = 0xF0000, 0x100000
_TAG = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
# The shared start of several prompts is encoded once, except for its last _CONTEXT_CHARACTERS, if that saves at least
# _SAVED_CHARACTERS. [Empirical]
_CONTEXT_CHARACTERS, _SAVED_CHARACTERS = 256, 4096

Side = Literal["left", "right"]


@dataclasses.dataclass(frozen=True, slots=True)
class TextCut:
    """A client's wish to cut prompts to `most_tokens` tokens at this side; `name` is the field that asks for it."""

    most_tokens: int
    side: Side
    name: str

    def kept(self, tokens: Tokens) -> Tokens:
        """Return the tokens that remain."""
        return tokens[: self.most_tokens] if self.side == "right" else tokens[-self.most_tokens :]


class TextEncoder:
    """Encodes rendered prompts, as the module's docstring explains. It is thread-safe."""

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
        kept = ("single_word", "lstrip", "rstrip")
        options = [{key: token[key] for key in kept} for token in control]
        pairs = zip(names.values(), options, strict=True)
        self._renamed.add_special_tokens([AddedToken(name, normalized=False, **option) for name, option in pairs])
        # Longest first: if one control token is a prefix of another, the longer one matches.
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # The copy gives new ids to added tokens that are not in the base vocabulary. `_ids` maps them back.
        self._ids = np.arange(1 + max(self._renamed.get_vocab().values()), dtype=np.int32)
        for token in added:
            renamed_id = self._renamed.token_to_id(names.get(token["content"], token["content"]))
            self._ids[renamed_id] = token["id"]
        self.control_tokens = {token["id"]: str(token["content"]) for token in control}  # by their ids
        self._original = original
        model = description["model"]
        # Any text that the vocabulary does not cover becomes the unknown token, so it is no sign of forgery.
        unknown = {model.get("unk_id"), original.token_to_id(model.get("unk_token") or "")}
        # The template's control tokens have the new names. An original name means that the tokenizer model merged it
        # from the user's text.
        self._is_forged = np.isin(self._ids, [*(self.control_tokens.keys() - unknown)])
        for name in names.values():
            self._is_forged[self._renamed.token_to_id(name)] = False

    def shield(self, text: str) -> str:
        """Return a user's text with marks inside all control tokens, so that a template may contain it."""
        while self._pattern.search(text):  # repeat, because matches may overlap
            text = self._pattern.sub(lambda match: match[0][0] + self._mark + match[0][1:], text)
        return text

    def encode(self, rendered: str, *, add_special: bool = False) -> Tokens:
        """Return the tokens of a rendered prompt, as `encode_all` does."""
        return self.encode_all([rendered], add_special=add_special)[0]

    def encode_all(self, rendered: Sequence[str], *, add_special: bool = False) -> list[Tokens]:
        """Return the tokens of several prompts; `add_special` adds the tokenizer's special tokens around each.

        Their shared start is encoded once if it is long. Raise InputError if a text is not valid Unicode, or if the
        user's text would become a control token.
        """
        shared = os.path.commonprefix(list(rendered)) if len(rendered) > 2 else ""  # noqa: RUF071  not paths
        if (len(shared) - _CONTEXT_CHARACTERS) * (len(rendered) - 3) < _SAVED_CHARACTERS:
            return self._encode_batch(rendered, add_special)
        first, last = self._encode_batch([rendered[0], rendered[-1]], add_special)
        cut = self._word_start(rendered[0], len(shared) - _CONTEXT_CHARACTERS, add_special)
        if cut is None:
            return self._encode_batch(rendered, add_special)
        character, token = cut
        ends = self._encode_batch([text[character:] for text in rendered], False)
        joined = [np.concatenate((first[:token], end)) for end in ends]
        # Tokenizers split text into words from left to right, so encoding may restart at a word. The first and the last
        # prompt show if a tokenizer does not, or if it adds tokens behind the text.
        if np.array_equal(joined[0], first) and np.array_equal(joined[-1], last):
            return joined
        return self._encode_batch(rendered, add_special)

    def encode_pairs(self, rendered: Sequence[tuple[str, str]]) -> list[Tokens]:
        """Return the tokens of pairs of texts, joined as the tokenizer joins pairs."""
        named = [(self._with_new_names(first), self._with_new_names(second)) for first, second in rendered]
        return self._original_ids(self._batch(named, True))

    def encode_cut(self, rendered: Sequence[tuple[str, ...]], cut: TextCut, *, add_special: bool) -> list[Tokens]:
        """Return the tokens of texts or pairs of texts, cut as transformers truncates them (`longest_first`).

        Special tokens of the tokenizer are counted, but never cut. Raises InputError if they leave no room.
        """
        named = [tuple(map(self._with_new_names, texts)) for texts in rendered]
        encodings = self._batch([texts[0] if len(texts) == 1 else texts for texts in named], add_special)  # type: ignore[arg-type]
        return [
            tokens[_kept_indices(encoding.sequence_ids, cut)]
            for tokens, encoding in zip(self._original_ids(encodings), encodings, strict=True)
        ]

    def names(self, tokens: Sequence[int]) -> list[str]:
        """Return the vocabulary entries of the tokens."""
        return [str(self._original.id_to_token(token)) for token in tokens]

    def cut(self, text: str, most_tokens: int, side: Side = "right") -> str:
        """Return a user's text without the characters at this side that are beyond `most_tokens` tokens."""
        characters = 16 * most_tokens
        while True:
            part = text[:characters] if side == "right" else text[-characters:]
            offsets = self._batch([self._with_new_names(self.shield(part))], False)[0].offsets
            # The tokens at the border of `part` may differ from those of the full text. The other half does not.
            if len(offsets) > 2 * most_tokens or (len(offsets) > most_tokens and len(part) == len(text)):
                return part[: offsets[most_tokens][0]] if side == "right" else part[offsets[-most_tokens - 1][1] :]
            if len(part) == len(text):
                return text
            characters *= 4

    def context_of(self, rendered: str) -> str:
        """Return the end of a rendered prompt that determines how a label behind it is encoded.

        Text before a control token has no influence, and no word extends over the start of a line.
        """
        tail = self._pattern.split(rendered)[-1]
        words = tail[-_CONTEXT_CHARACTERS:]
        return words if len(words) == len(tail) else words[words.find(" ") + 1 :]

    def begins_with_control_token(self, rendered: str) -> bool:
        """Return True if the text starts with a control token or is empty."""
        return not rendered or self._pattern.match(rendered) is not None

    def _with_new_names(self, rendered: str) -> str:
        """Return `rendered` with new names for the template's control tokens, and without marks."""
        names = self._pattern.findall(rendered)
        if not names:
            return rendered.replace(self._mark, "")
        texts = [text.replace(self._mark, "") for text in self._pattern.split(rendered)]
        return texts[0] + "".join(self._names[name] + text for name, text in zip(names, texts[1:], strict=True))

    def _word_start(self, rendered: str, before: int, add_special: bool) -> tuple[int, int] | None:
        """Return the character and the token of the last word start before character `before`, or None."""
        start = max(rendered.rfind("\n", 0, before), rendered.rfind(" ", 0, before))
        return None if start <= 0 else (start, len(self._encode_batch([rendered[:start]], add_special)[0]))

    def _batch(self, named: Sequence[str] | Sequence[tuple[str, str]], add_special: bool) -> Any:
        try:
            return self._renamed.encode_batch(list(named), add_special_tokens=add_special)
        except (TypeError, UnicodeError) as error:  # Python strings may contain lone surrogates
            text = "the text is not valid Unicode: it contains half of a surrogate pair; remove it"
            raise InputError(text, name="text") from error

    def _encode_batch(self, rendered: Sequence[str], add_special: bool) -> list[Tokens]:
        return self._original_ids(self._batch([*map(self._with_new_names, rendered)], add_special))

    def _original_ids(self, encodings: Sequence[Any]) -> list[Tokens]:
        """Return the original ids of each encoding, mapped as one array because many encodings are short."""
        renamed_ids = [encoding.ids for encoding in encodings]
        flat = np.fromiter(itertools.chain.from_iterable(renamed_ids), np.int32)
        ids: Tokens = self._ids[flat]
        forged = self._is_forged[flat]
        if forged.any():
            # Special tokens that the tokenizer itself adds around the text are legitimate.
            masks = itertools.chain.from_iterable(encoding.special_tokens_mask for encoding in encodings)
            forged &= np.fromiter(masks, np.int32) == 0
            if forged.any():
                content = self.control_tokens[int(ids[forged][0])]
                text = (
                    f"the text contains {content!r}, which this tokenizer always encodes as a control token; remove it"
                )
                raise InputError(text, name="text", value=content)
        ends = [0, *itertools.accumulate(map(len, renamed_ids))]
        return [ids[start:end] for start, end in itertools.pairwise(ends)]


def _kept_indices(sequence_ids: Sequence[int | None], cut: TextCut) -> list[int]:
    """Return the indices of the tokens that remain; `sequence_ids` are the text of each token, None if special."""
    indices = [[index for index, text in enumerate(sequence_ids) if text == number] for number in (0, 1)]
    special = len(sequence_ids) - sum(map(len, indices))
    room = cut.most_tokens - special
    if room < 1:
        expected = f"{special + 1} or more, because the tokenizer adds {special} special tokens"
        raise InputError.wrong(cut.name, cut.most_tokens, expected)
    excess = len(sequence_ids) - cut.most_tokens
    if excess <= 0:
        return list(range(len(sequence_ids)))
    shorter, longer = sorted(indices, key=len)
    # Only the longer text is cut, unless the shorter one has more than half of the tokens.
    kept = min(len(shorter), room // 2)
    dropped: set[int] = set()
    for text_indices, count in ((shorter, kept), (longer, room - kept)):
        dropped.update(text_indices[count:] if cut.side == "right" else text_indices[: len(text_indices) - count])
    return [index for index in range(len(sequence_ids)) if index not in dropped]


def _is_control(token: dict[str, Any]) -> bool:
    # Other added tokens are words or runs of blanks.
    content = token["content"]
    return len(content) > 1 and bool(token["special"] or _TAG.fullmatch(content))

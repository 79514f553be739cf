"""Tokens as text: names, bytes and offsets, with tokenizers of the kinds that published models have."""

from __future__ import annotations

import unicodedata

import pytest
from transformers import PreTrainedTokenizerFast

from moepass.runtime.serving.questions.token_texts import TokenTexts
from tests.helpers.serving.tokenizers_of_kinds import KINDS

TEXTS = (
    "yes no",
    " the cat",
    "two  blanks and\na line",
    "größe Ö",
    "日本語 text",
    "👍🏽 ok 👨‍👩‍👧",
    "a",
    "ÿ" * 3,
    "yes 👍",
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return KINDS[request.param]()


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_begin_where_their_characters_do(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    texts = TokenTexts(tokenizer)
    tokens = tokenizer(text)["input_ids"]
    pieces = [texts.utf8(token) or b"" for token in tokens]
    joined = b"".join(pieces[1:]).decode()
    assert joined in (text, f" {text}")
    added = len(joined) - len(text)  # 1 if the tokenizer adds a blank in front
    offsets = texts.offsets(tokens, text)
    assert offsets[0] == 0
    for index in range(1, len(tokens)):
        before = b"".join(pieces[1:index]).decode(errors="ignore")
        assert offsets[index] == max(0, len(before) - added)


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_ids_contains_all_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    texts = TokenTexts(tokenizer)
    tokens = tokenizer(text)["input_ids"]
    decoded = texts.text(tokens)
    assert decoded.startswith("<s>")
    starts = texts.offsets(tokens, decoded)
    assert starts[:2] == [0, 3]
    assert starts == sorted(starts)
    assert starts[-1] < len(decoded)


def test_parts_of_characters_are_named_by_their_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = TokenTexts(tokenizer)
    tokens = tokenizer("👍")["input_ids"][-4:]
    assert [texts.name(token) for token in tokens] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x91", "bytes:\\x8d"]
    assert [texts.utf8(token) for token in tokens] == [b"\xf0", b"\x9f", b"\x91", b"\x8d"]
    assert texts.utf8(len(tokenizer)) is None
    assert texts.name(len(tokenizer)) == f"token_id:{len(tokenizer)}"


def test_blanks_belong_to_names(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = TokenTexts(tokenizer)
    names = [texts.name(token) for token in tokenizer("a yes no")["input_ids"]]
    assert "".join(names[1:]).removeprefix(" ") == "a yes no"
    assert len(names) >= 4


def test_a_text_that_the_tokenizer_composes_keeps_its_own_characters() -> None:
    tokenizer = KINDS["byte levels"]()
    text = unicodedata.normalize("NFD", "größe größe yes")
    offsets = TokenTexts(tokenizer).offsets(tokenizer(text)["input_ids"], text)
    assert offsets[-1] == text.index("yes") - 1

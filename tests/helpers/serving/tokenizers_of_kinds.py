"""Small tokenizers of the kinds that published models have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_LINES = ["a yes a no yes no the cat sat on the mat", "level number one two three", "wörter größe 日本語 text"] * 4
_BEGIN = "<s>"


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2 and Mixtral have it: blanks as marks, byte fallback, and a token for the start."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_begin(_trained_with_bytes(tokenizer))


def metaspaces() -> PreTrainedTokenizerFast:
    """Return a tokenizer as newer conversions of SentencePiece have it, with blanks marked by a pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return _with_begin(_trained_with_bytes(tokenizer))


def byte_levels() -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 3 has it: bytes as characters, and a token for the start. It composes characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, [_BEGIN], pre_tokenizers.ByteLevel.alphabet())
    return _with_begin(tokenizer)


def _train(tokenizer: Tokenizer, special: list[str], alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_LINES, trainer)


def _trained_with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """Return the trained tokenizer, with an ordinary entry of its vocabulary for each byte."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    _train(tokenizer, ["<unk>", _BEGIN, *names], [])
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["content"] not in names]
    return Tokenizer.from_str(json.dumps(description))


def _with_begin(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    begin = (_BEGIN, tokenizer.token_to_id(_BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(f"{_BEGIN} $A", None, [begin])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=_BEGIN, eos_token=_BEGIN)


KINDS: Mapping[str, Callable[[], PreTrainedTokenizerFast]] = {
    "sentence pieces": sentence_pieces,
    "metaspaces": metaspaces,
    "byte levels": byte_levels,
}

"""/v1/completions, /v1/chat/completions and the token routes, compared with plain transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from moepass.models.errors import CheckpointError
from moepass.runtime.serving.routes.completions import json_log_probability
from tests.helpers.serving.plain_scores import next_token_table
from tests.helpers.serving.served import CHAT_TEMPLATE, Served, served
from tests.helpers.serving.tokenizers_of_kinds import KINDS

TEXT = "The cat sat on the mat"


def test_a_prompt_is_scored_token_by_token(base: Served) -> None:
    tokens = base.writer.tokenizer(TEXT)["input_ids"]
    table = next_token_table(base.backend.model, tokens)
    with openai.OpenAI(base_url=f"{base.url}/v1", api_key="any") as client:
        reply = client.completions.create(
            model="tiny", prompt=tokens, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1
        )
    (choice,) = reply.choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    expected = [float(table[position, token]) for position, token in enumerate(tokens[1:])]
    assert choice.logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
    assert choice.logprobs.token_logprobs[-1] == pytest.approx(float(table[-1].max()), abs=1e-4)
    # Evaluation harnesses call a token greedy if its log-probability is the largest one.
    for position, (value, best) in enumerate(
        zip(choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True)
    ):
        is_best = position == len(tokens) - 1 or int(table[position].argmax()) == tokens[position + 1]
        assert (value == max(best.values())) is is_best
    assert choice.text == TEXT + base.writer.tokenizer.decode([int(table[-1].argmax())])
    assert "".join((choice.logprobs.tokens or [])[:-1]) == TEXT
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(tokens), 1)


def test_prompts_of_a_batch_are_answered_in_order(base: Served) -> None:
    prompts = [TEXT, "a dog", "x"]
    reply = base.post("/v1/completions", {"prompt": prompts, "max_tokens": 1, "logprobs": 0})
    for index, prompt in enumerate(prompts):
        choice = reply["choices"][index]
        table = next_token_table(base.backend.model, base.writer.tokenizer(prompt)["input_ids"])
        assert choice["index"] == index
        assert choice["logprobs"]["token_logprobs"] == pytest.approx([float(table[-1].max())], abs=1e-4)
    of_tokens = [base.writer.tokenizer(prompt)["input_ids"] for prompt in prompts]
    again = base.post("/v1/completions", {"prompt": of_tokens, "max_tokens": 1, "logprobs": 0})
    assert again["choices"] == reply["choices"]


def test_no_token_is_returned_if_none_is_requested(base: Served) -> None:
    (choice,) = base.post("/v1/completions", {"prompt": TEXT, "max_tokens": 0})["choices"]
    assert choice == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    (choice,) = base.post("/v1/completions", {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 2})["choices"]
    assert choice["text"] == TEXT
    assert len(choice["logprobs"]["tokens"]) == len(base.writer.tokenizer(TEXT)["input_ids"])
    assert choice["logprobs"]["text_offset"][:2] == [0, len(choice["logprobs"]["tokens"][0])]


def test_a_stop_string_ends_the_token(base: Served) -> None:
    body = {"prompt": "def main", "max_tokens": 1}
    (choice,) = base.post("/v1/completions", body)["choices"]
    assert choice["text"]
    (stopped,) = base.post("/v1/completions", body | {"stop": choice["text"]})["choices"]
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")


def test_a_stream_is_the_answer_in_one_event(base: Served) -> None:
    with openai.OpenAI(base_url=f"{base.url}/v1", api_key="any") as client:
        complete = client.completions.create(model="tiny", prompt=TEXT, max_tokens=1)
        chunks = list(
            client.completions.create(
                model="tiny", prompt=TEXT, max_tokens=1, stream=True, stream_options={"include_usage": True}
            )
        )
    assert [chunk.choices[0].text for chunk in chunks if chunk.choices] == [complete.choices[0].text]
    assert chunks[-1].usage == complete.usage


def test_tokens_may_be_named_by_their_ids(base: Served) -> None:
    body = {"prompt": [5, 6], "max_tokens": 0, "echo": True, "logprobs": 3, "return_tokens_as_token_ids": True}
    (choice,) = base.post("/v1/completions", body)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6"]
    assert len(choice["logprobs"]["top_logprobs"][1]) in (3, 4)


def test_tokens_with_equal_texts_are_all_listed(base: Served) -> None:
    # Ids beyond the tokenizer's vocabulary and parts of characters have no unique text.
    body = {"prompt": TEXT, "max_tokens": 1, "logprobs": 20}
    (choice,) = base.post("/v1/completions", body)["choices"]
    assert len(choice["logprobs"]["top_logprobs"][0]) == 20


def test_log_probabilities_are_representable_in_json() -> None:
    assert [json_log_probability(value) for value in (-1.5, float("-inf"), -1e9)] == [-1.5, -9999.0, -9999.0]
    with pytest.raises(CheckpointError, match="outputs are NaN"):
        json_log_probability(float("nan"))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 2}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 0.7}, "temperature"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": [5] * 1025}, "prompt"),
    ],
)
def test_unsupported_completion_fields_are_refused_by_name(base: Served, change: dict[str, Any], param: str) -> None:
    assert base.refused("/v1/completions", {"prompt": "a", "max_tokens": 1} | change)["param"] == param


def test_more_than_one_token_is_refused_with_a_message(base: Served) -> None:
    message = base.refused("/v1/completions", {"prompt": "a"})["message"]
    assert message == (
        "max_tokens is 16, but this server computes one prefill and does not decode; set max_tokens to 0 or 1"
    )


def test_a_conversation_gets_its_likeliest_token(chat: Served, client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": TEXT}]},
    ]
    reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, logprobs=True, top_logprobs=3)
    tokens = chat.writer.tokenizer(f"<|system|>be<|end|><|user|>{TEXT}<|end|><|assistant|>")["input_ids"]
    best = next_token_table(chat.backend.model, tokens)[-1].topk(3)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    (said,) = logprobs.content
    assert said.logprob == pytest.approx(float(best.values[0]), abs=1e-4)
    assert [listed.logprob for listed in said.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert reply.choices[0].message.content == chat.writer.tokenizer.decode([int(best.indices[0])])
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(tokens)
    stream = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=1, stream=True)
    assert [chunk.choices[0].delta.content for chunk in stream] == [reply.choices[0].message.content]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_conversations_that_cannot_be_continued_are_refused_by_name(
    chat: Served, change: dict[str, Any], param: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | change
    assert chat.refused("/v1/chat/completions", body)["param"] == param


def test_a_model_without_a_chat_template_takes_no_messages(base: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert "no chat template" in base.refused("/v1/chat/completions", body)["message"]


def test_texts_become_tokens_and_back(chat: Served) -> None:
    reply = chat.post("/tokenize", {"prompt": TEXT, "return_token_strs": True})
    assert reply["tokens"] == chat.writer.tokenizer(TEXT)["input_ids"]
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 1024)
    assert "".join(reply["token_strs"]).replace("Ġ", " ") == TEXT
    assert chat.post("/detokenize", {"tokens": reply["tokens"]}) == {"prompt": TEXT}
    for role, tag in (("user", "user"), ("developer", "system")):  # as /v1/chat/completions renders them
        of_messages = chat.post("/tokenize", {"messages": [{"role": role, "content": "x"}]})
        assert of_messages["tokens"] == chat.writer.tokenizer(f"<|{tag}|>x<|end|><|assistant|>")["input_ids"]
    control = set(chat.writer.encoder.control_tokens)
    assert not control.intersection(chat.post("/tokenize", {"prompt": "<|end|>"})["tokens"])
    assert chat.refused("/tokenize", {})["param"] == "prompt"
    assert chat.refused("/detokenize", {"tokens": [512]})["param"] == "tokens"
    # The model has more output rows than the tokenizer has tokens.
    assert chat.post("/detokenize", {"tokens": [511]}) == {"prompt": ""}


def test_the_tokenizer_says_what_it_is(chat: Served) -> None:
    reply = chat.client.get("/tokenizer_info").json()
    assert (reply["eos_token"], reply["chat_template"]) == ("<|end|>", CHAT_TEMPLATE)
    assert reply["control_tokens"]["0"] == "<|end|>"


@pytest.fixture(scope="module", params=KINDS)
def of_kind(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("kind")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, folder)
    KINDS[request.param]().save_pretrained(folder)
    with served(folder) as running:
        yield running


@pytest.mark.parametrize("prompt", ["yes no", " the cat", "日本語 Ö 👍🏽", "a", "two  blanks\n"])
def test_the_echo_of_a_text_is_the_text(of_kind: Served, prompt: str) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}
    (choice,) = of_kind.post("/v1/completions", body)["choices"]
    tokens = of_kind.writer.tokenizer(prompt)["input_ids"]
    assert choice["text"].startswith(prompt)
    offsets, names = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert len(offsets) == len(names) == len(tokens) + 1
    assert offsets == sorted(offsets)
    assert offsets[:2] == [0, 0]  # the token for the start has no characters
    assert offsets[-1] == len(prompt)
    for name, start in zip(names[1:], offsets[1:], strict=True):
        is_named_by_text = not name.startswith(("bytes:", "token_id:"))
        assert not is_named_by_text or choice["text"][start:].startswith((name, name.removeprefix(" ")))


def test_the_bytes_of_a_part_of_a_character_are_listed(chat: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
    reply = chat.post("/v1/chat/completions", body)
    texts = chat.writer.token_texts
    pieces = {texts.name(token): texts.utf8(token) for token in range(len(chat.writer.tokenizer))}
    for listed in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        piece = pieces.get(listed["token"])
        assert listed["bytes"] == (None if piece is None else list(piece))
    (ordinary,) = chat.writer.tokenizer("Ö")["input_ids"][:1]
    assert texts.utf8(ordinary) == b"\xc3"
    assert texts.name(ordinary) == "bytes:\\xc3"


@pytest.mark.parametrize(("logprobs", "uses_cache"), [(0, True), (1, True), (2, False), (5, False)])
def test_the_cache_has_the_most_likely_token_only(base: Served, logprobs: int, uses_cache: bool) -> None:
    prompt = [100 + logprobs, *range(7, 7 + 40)]
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": logprobs}
    replies = [base.post("/v1/completions", body) for _ in range(3)]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached[0] == 0
    assert (cached[2] > 0) is uses_cache
    values = [reply["choices"][0]["logprobs"]["token_logprobs"] for reply in replies]
    assert values[2][1:] == pytest.approx(values[0][1:], abs=1e-5)

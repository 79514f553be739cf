"""Clients of other projects get the numbers of plain transformers from a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.pipelines import DecisionPipeline

from tests.helpers.serving.byte_checkpoint import save_byte_checkpoint
from tests.helpers.serving.plain_scores import label_log_probability, next_token_table
from tests.helpers.serving.served import CHAT_TEMPLATE, Served, served

pytestmark = pytest.mark.packages

TEXT = "The cat sat on the mat"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_checkpoint(tmp_path_factory.mktemp("clients") / "tiny")


@pytest.fixture(scope="module")
def chat(checkpoint: Path) -> Iterator[Served]:
    with served(checkpoint, chat_template=CHAT_TEMPLATE) as running:
        yield running


def normalised_state(server: Served) -> list[float]:
    """Return the model's state of the last token of TEXT, with length 1."""
    ids = torch.tensor([server.writer.tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        state = server.backend.model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
    return torch.nn.functional.normalize(state, dim=0).tolist()


def test_lm_eval_gets_the_log_probabilities_of_continuations(chat: Served, checkpoint: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    url = f"{chat.url}/v1/completions"
    client = LocalCompletionsAPI(model="tiny", base_url=url, tokenizer=str(checkpoint), max_length=512)
    pairs = [(TEXT, " and ran"), ("a dog ran", " to the park"), ("yes", " no")]
    answers = client.loglikelihood([Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)])
    tokenizer, model = chat.writer.tokenizer, chat.backend.model
    for (context, continuation), (log_probability, is_greedy) in zip(pairs, answers, strict=True):
        tokens, start = tokenizer(context + continuation)["input_ids"], len(tokenizer(context)["input_ids"])
        expected = label_log_probability(model, tokens[:start], tokens[start:])
        assert log_probability == pytest.approx(expected, rel=1e-5)
        best = next_token_table(model, tokens).argmax(-1)[start - 1 : -1].tolist()
        assert is_greedy == (best == tokens[start:])


def test_langchain_gets_log_probabilities_and_embeddings(chat: Served) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    keys = {"model": "tiny", "base_url": f"{chat.url}/v1", "api_key": "any", "max_retries": 0}
    tokenizer, model = chat.writer.tokenizer, chat.backend.model
    reply = ChatOpenAI(**keys, max_tokens=1, temperature=0, logprobs=True, top_logprobs=5).invoke(TEXT)
    (token,) = reply.response_metadata["logprobs"]["content"]
    prompt = tokenizer(f"<|user|>{TEXT}<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    expected = next_token_table(model, prompt)[-1].topk(5).values.tolist()
    assert [entry["logprob"] for entry in token["top_logprobs"]] == pytest.approx(expected, abs=1e-4)
    vector = OpenAIEmbeddings(**keys, check_embedding_ctx_length=False).embed_query(TEXT)
    assert vector == pytest.approx(normalised_state(chat), abs=1e-4)


def test_typesafe_sdk_gets_the_answers_of_transformers_pipeline(chat: Served) -> None:
    from typesafe_sdk import Choice, Noul, Score, TypeSafeClient, TypeSafeNotFoundError

    questions = {
        "spam": Noul(instructions={"task": "Is it spam?"}, criteria={"true": "Ads", "false": ["no", "ads"]}),
        "tone": Choice(instructions="Tone?", criteria={"calm": None, "mad": {"k": 1}}),
        "urgent": Score(criteria=["Later", {"level": "soon"}, "Now"]),
    }
    state = {"message": TEXT, "n": 1}
    tokenizer = chat.writer.tokenizer
    tokenizer.chat_template = CHAT_TEMPLATE
    pipeline = DecisionPipeline(model=chat.backend.model, tokenizer=tokenizer)
    expected = pipeline({"state": state, "questions": {name: item.model_dump() for name, item in questions.items()}})
    with TypeSafeClient(base_url=chat.url, api_key="any", model="tiny") as client:
        result = client.system_one(state, questions)
        assert result.nouls["spam"].noul == pytest.approx(expected["spam"]["noul"], abs=1e-4)
        assert result.choices["tone"].probabilities == pytest.approx(expected["tone"]["probabilities"], abs=1e-4)
        assert result.scores["urgent"].score == pytest.approx(expected["urgent"]["score"], abs=1e-4)
        assert result.request_id.startswith("req-")
        assert [model.name for model in client.models.list().models] == ["tiny", "alias"]
        with pytest.raises(TypeSafeNotFoundError, match="jev-latest"):
            client.system_one(state, questions, model="jev-latest")


def test_litellm_gets_log_probabilities_and_embeddings(chat: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices
    import litellm

    keys = {"api_base": f"{chat.url}/v1", "api_key": "any", "num_retries": 0}
    tokenizer, model = chat.writer.tokenizer, chat.backend.model
    reply = litellm.text_completion(model="text-completion-openai/tiny", prompt=TEXT, max_tokens=1, logprobs=5, **keys)
    expected = next_token_table(model, tokenizer(TEXT)["input_ids"])[-1].topk(5).values.tolist()
    (top,) = reply.choices[0].logprobs.top_logprobs
    assert sorted(top.values(), reverse=True) == pytest.approx(expected, abs=1e-4)
    embedded = litellm.embedding("openai/tiny", input=[TEXT], encoding_format="float", **keys)
    assert embedded.data[0]["embedding"] == pytest.approx(normalised_state(chat), abs=1e-4)

"""Part `serve`: `moepass serve demo` as a process, with its answers compared with those of plain transformers."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.acceptance.results import NotRunError, PartChecks
from benchmarks.on_gpu.target import Target, WrongResultError

NEEDED = ("fastapi", "httpx", "tokenizers", "uvicorn", "zmq")
TEXT = "Bitte geben Sie eine gültige Adresse ein"
# Names of the choices, and the demo's labels for them.
CHOICES = {"English": "<en>", "German": "<de>", "French": "<fr>"}
# The largest allowed difference of probabilities and their logarithms, for weights in float32.
MOST_DIFFERENCE = 1e-3
AT_ONCE = 32

# Sends a body to a path of the server and returns its answer.
Post = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Expected:
    """A prompt, the log-probabilities of its tokens but the first and of the best next one, and the choices'."""

    prompt: list[int]
    log_probabilities: list[float]
    choice_probabilities: list[float]


def serve(target: Target, checks: PartChecks, folder: Path) -> None:
    """Start the server with its default options, on a CPU uncompiled, and ask it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NotRunError(f"the server needs {', '.join(missing)}, which are not installed for this Python")
    from tests.helpers.serving.server_process import serving

    expected = expected_answers()
    arguments = ["demo"] if target.is_gpu else ["demo", "--device", "cpu", "--eager"]
    with serving(*arguments, cache=folder / "compiled") as server:
        assert server.process.stderr is not None
        checks.run("device", functools.partial(check_device, server.process.stderr, target.device.type))
        post = functools.partial(post_json, server.url)
        complete = functools.partial(complete_by_openai, server.url) if _has_openai() else post
        by = "openai's client" if _has_openai() else "HTTP: openai is not installed"
        checks.run(f"completion by {by}", functools.partial(check_completion, complete, expected))
        checks.run("decision", functools.partial(check_decision, post, expected))
        checks.run(f"{AT_ONCE} prompts at once", functools.partial(check_many, post, expected))
        checks.run("end", lambda: check_end(server.end()))


def expected_answers() -> Expected:
    """Return the answers of the demo model in plain transformers on the CPU."""
    from moepass.models.checkpoint.checkpoint_folders import DEMO, load_tokenizer, resolve_model
    from moepass.models.checkpoint.load_model import load_model
    from tests.helpers.serving.plain_scores import label_probabilities, next_token_table

    folder = resolve_model(DEMO)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    prompt = tokenizer(f"{TEXT}<sep>")["input_ids"]
    table = next_token_table(model, prompt)
    labels = [[tokenizer.convert_tokens_to_ids(label)] for label in CHOICES.values()]
    return Expected(
        prompt,
        [*(float(table[position, token]) for position, token in enumerate(prompt[1:])), float(table[-1].max())],
        label_probabilities(model, prompt, labels),
    )


def _has_openai() -> bool:
    return importlib.util.find_spec("openai") is not None


def complete_by_openai(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the completion of `body`, whatever the `path`, by the client of package openai."""
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        reply: dict[str, Any] = client.completions.create(**body).model_dump()
    return reply


def post_json(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the server at `url`."""
    import httpx

    response = httpx.post(f"{url}{path}", json=body, timeout=30, trust_env=False)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def check_device(lines: Iterable[str], kind: str) -> str:
    """Check in the output of the server that its ranks compute on devices of `kind`."""
    line = next((line for line in lines if line.startswith("computes on ")), "").strip()
    if not line.startswith(f"computes on {kind}"):
        raise WrongResultError(f"the server should compute on {kind}, but says {line!r}")
    return line


def check_completion(post: Post, expected: Expected) -> str:
    """Check the log-probabilities of the tokens of a prompt and of the next one."""
    body = {"model": "demo", "prompt": expected.prompt, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    (choice,) = post("/v1/completions", body)["choices"]
    return _compared(choice["logprobs"]["token_logprobs"][1:], expected.log_probabilities)


def check_decision(post: Post, expected: Expected) -> str:
    """Check the probabilities of the choices of a question."""
    choices = [{"value": choice} for choice in CHOICES]
    question = {"type": "choice", "instructions": "Which language is this?", "choices": choices}
    (answer,) = post("/v1/decisions", {"model": "demo", "input": TEXT, "questions": [question]})["answers"]
    found = {entry["value"]: entry["probability"] for entry in answer["probabilities"]}
    return _compared([found[choice] for choice in CHOICES], expected.choice_probabilities)


def check_many(post: Post, expected: Expected) -> str:
    """Check prompts of different lengths that clients ask for at the same time."""

    def check(number: int) -> str:
        count = 2 + number % (len(expected.prompt) - 1)
        body = {"model": "demo", "prompt": expected.prompt[:count], "max_tokens": 0, "logprobs": 1, "echo": True}
        (choice,) = post("/v1/completions", body)["choices"]
        return _compared(choice["logprobs"]["token_logprobs"][1:], expected.log_probabilities[: count - 1])

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return f"the longest of {AT_ONCE}: {list(threads.map(check, range(AT_ONCE)))[len(expected.prompt) - 2]}"


def check_end(status: int) -> str:
    """Check the exit status of a server that was asked to end."""
    if status != 0:
        raise WrongResultError(f"the server ended with status {status} after SIGTERM")
    return "status 0 after SIGTERM"


def _compared(found: Sequence[float], expected: Sequence[float]) -> str:
    difference = np.max([abs(one - other) for one, other in zip(found, expected, strict=True)])  # NaN if one is
    if not difference <= MOST_DIFFERENCE:
        raise WrongResultError(f"differs from plain transformers by {difference:.1e}")
    return f"{len(expected)} numbers differ from plain transformers by {difference:.1e} at most"

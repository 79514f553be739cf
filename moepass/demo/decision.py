"""The second part of `moepass demo`: one decision with two questions over HTTP, printed as sent and received."""

from __future__ import annotations

import json
from typing import Any

import httpx
from rich.console import Console

from moepass.models.errors import MoepassError

REQUEST = {
    "model": "demo",
    "input": "Bitte geben Sie eine gültige Adresse ein",
    "questions": [
        {
            "type": "choice",
            "instructions": "Which language is this?",
            "choices": [{"value": "German"}, {"value": "Dutch"}, {"value": "English"}],
        },
        {
            "type": "choice",
            "instructions": "German or Danish?",
            "choices": [{"value": "German"}, {"value": "Danish"}],
        },
    ],
}
_SECONDS = 60.0


class DemoError(MoepassError, RuntimeError):
    """The demo's server has answered with an error."""


async def ask_decision(url: str) -> None:
    """Print a request, send it to the server at `url`, and print the answer. Raises DemoError."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"\nOne decision with two questions over HTTP: POST {url}/v1/decisions", style="bold")
    console.print(readable(REQUEST), markup=False)
    async with httpx.AsyncClient(base_url=url, timeout=_SECONDS, trust_env=False) as client:
        response = await client.post("/v1/decisions", json=REQUEST)
    if response.status_code != 200:
        raise DemoError(
            f"the demo's server has answered with status {response.status_code}: {response.text[:500]}",
            value=response.status_code,
        )
    console.print("Its answer:", style="bold")
    console.print(readable(response.json()), markup=False)
    console.print(
        "To keep such a server running, use [bold]moepass serve demo[/bold]; README.md shows requests for it."
    )


def readable(value: dict[str, Any]) -> str:
    """Return `value` as JSON with one line for each field, and for each item of a list."""
    fields = []
    for name, field in value.items():
        if isinstance(field, list):
            items = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in field)
            fields.append(f"  {json.dumps(name)}: [\n{items}\n  ]")
        else:
            fields.append(f"  {json.dumps(name)}: {json.dumps(field, ensure_ascii=False)}")
    return "{\n" + ",\n".join(fields) + "\n}"

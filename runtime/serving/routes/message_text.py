"""Messages, tool calls and JSON of clients as the text that a question is about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from moepass.models.errors import InputError


class InputPart(msgspec.Struct):
    """A part of a message: text, or JSON (`data`). Images are refused."""

    type: str
    text: str | None = None
    data: dict[str, Any] | list[dict[str, Any]] | None = None
    refusal: str | None = None


Content = str | list[InputPart]


class InputItem(msgspec.Struct):
    """An item of a conversation: a message, a tool call, or the output of a tool call."""

    type: str = "message"
    role: str | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content | None = None


_ROLES = ("user", "developer", "system", "assistant")
_CALLS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}


def content_text(content: Content, name: str) -> str:
    """Return the text of a message's content, with its parts on separate lines. Raise InputError for other parts."""
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(element, f"{name}[{number}]") for number, element in enumerate(content))


def input_text(items: str | Sequence[InputItem], name: str = "input") -> str:
    """Return the text of an input: the content of a single user message, or a transcript with roles.

    Raises InputError if it is blank, a role or type is unknown, a part is an image, or a tool output has no call.
    """
    if isinstance(items, str):
        return check_not_blank(items, name)
    if not items:
        raise InputError(f"{name} is empty; send a text, or one or more messages", name=name, expected="1 or more")
    if len(items) == 1 and items[0].type == "message" and items[0].role == "user":
        content = _required(items[0].content, "content", f"{name}[0]")
        return check_not_blank(content_text(content, f"{name}[0].content"), name)
    calls: dict[tuple[str, str], bool] = {}
    return "\n".join(_item_text(item, f"{name}[{number}]", calls) for number, item in enumerate(items))


def json_text(value: str | dict[str, Any] | list[Any] | None, *, compact: bool = True) -> str:
    """Return a text unchanged, "" for None, and any other value as JSON: compact, or with Python's spaces."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    separators = (",", ":") if compact else None
    return json.dumps(value, ensure_ascii=False, separators=separators)


def check_no_images(value: Any, name: str) -> None:
    """Raise InputError if JSON contains an image in the format of OpenAI's messages, which would become a text."""
    if isinstance(value, dict):
        if value.get("type") == "image_url" and "image_url" in value:
            raise InputError(f"{name} is an image, but this server only takes text and JSON", name=name)
        for key, item in value.items():
            check_no_images(item, f"{name}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            check_no_images(item, f"{name}[{number}]")


def _item_text(item: InputItem, name: str, calls: dict[tuple[str, str], bool]) -> str:
    if item.type == "message":
        if item.role not in _ROLES:
            problem = f"{name}.role is {item.role!r}; it must be one of {', '.join(_ROLES)}"
            raise InputError(problem, name=f"{name}.role", value=item.role, expected=_ROLES)
        content = _required(item.content, "content", name)
        return f"{item.role}: {content_text(content, f'{name}.content')}"
    if item.type in _CALLS:
        calls[_CALLS[item.type], _required(item.call_id, "call_id", name)] = True
        field = "arguments" if item.type == "function_call" else "input"
        arguments = _required(getattr(item, field), field, name)
        return f"{item.type} {_required(item.name, 'name', name)}: {arguments}"
    if item.type in _CALLS.values():
        if (item.type, _required(item.call_id, "call_id", name)) not in calls:
            text = f"{name}.call_id is {item.call_id!r}, but no call before it has this id; send the call first"
            raise InputError(
                text, name=f"{name}.call_id", value=item.call_id, expected=[call_id for _, call_id in calls]
            )
        return f"{item.type}: {content_text(_required(item.output, 'output', name), f'{name}.output')}"
    types = ("message", *_CALLS, *_CALLS.values())
    problem = f"{name}.type is {item.type[:100]!r}; it must be one of {', '.join(types)}"
    raise InputError(problem, name=f"{name}.type", value=item.type, expected=types)


def _part_text(part: InputPart, name: str) -> str:
    if "image" in part.type or "audio" in part.type or "video" in part.type or "file" in part.type:
        problem = f"{name} has type {part.type[:100]!r}, but this server only takes text and JSON"
        raise InputError(problem, name=name, value=part.type)
    text = json_text(part.data) if part.type == "input_json" else (part.text or part.refusal)
    if part.type not in ("text", "input_text", "output_text", "refusal", "input_json"):
        problem = f"{name}.type is {part.type[:100]!r}; it must be text, input_text, output_text, refusal or input_json"
        raise InputError(problem, name=f"{name}.type", value=part.type)
    return text or ""


def _required(value: Any, field: str, name: str) -> Any:
    if value is None:
        raise InputError(f"{name} has no {field}; it is required here", name=f"{name}.{field}")
    return value


def check_not_blank(text: str, name: str) -> str:
    """Return `text`. Raise InputError if it is blank."""
    if not text.strip():
        raise InputError(f"{name} is blank; send a text", name=name, value=text)
    return text

"""Inputs as clients send them (text, messages, tool calls, JSON) become the text that a question is about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from moepass.models.errors import InputError


class InputPart(msgspec.Struct):
    """A part of a message: text, JSON (`data`), or an image, which is refused."""

    type: str
    text: str | None = None
    data: dict[str, Any] | list[dict[str, Any]] | None = None
    refusal: str | None = None


Content = str | list[InputPart]


class InputItem(msgspec.Struct):
    """An item of a conversation: a message, or the call of a tool, or what came out of one."""

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
    """The text of a message's content, parts in lines of their own. Raises InputError, naming `name`."""
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{name}[{number}]") for number, part in enumerate(content))


def input_text(items: str | Sequence[InputItem], name: str = "input") -> str:
    """The text of an input. A single user message is its content alone; more are a transcript, a role before each.

    Raises InputError for an empty input, unknown roles, types and images, and for a tool's output without its call.
    """
    if isinstance(items, str):
        return check_not_blank(items, name)
    if not items:
        raise InputError(f"{name} is empty; give a text, or one message or more", name=name, expected="1 or more")
    if len(items) == 1 and items[0].type == "message" and items[0].role == "user":
        content = _given(items[0].content, "content", f"{name}[0]")
        return check_not_blank(content_text(content, f"{name}[0].content"), name)
    calls: dict[tuple[str, str], bool] = {}
    return "\n".join(_item_text(item, f"{name}[{number}]", calls) for number, item in enumerate(items))


def json_text(value: str | dict[str, Any] | list[Any] | None, *, compact: bool) -> str:
    """A text as it is, None as none, and anything else as JSON: compact, or with blanks as Python writes it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    separators = (",", ":") if compact else None
    return json.dumps(value, ensure_ascii=False, separators=separators)


def _item_text(item: InputItem, name: str, calls: dict[tuple[str, str], bool]) -> str:
    if item.type == "message":
        if item.role not in _ROLES:
            raise InputError(
                f"{name}.role is {item.role!r}; it must be one of {', '.join(_ROLES)}",
                name=f"{name}.role",
                value=item.role,
                expected=_ROLES,
            )
        content = _given(item.content, "content", name)
        return f"{item.role}: {content_text(content, f'{name}.content')}"
    if item.type in _CALLS:
        calls[_CALLS[item.type], _given(item.call_id, "call_id", name)] = True
        given = item.arguments if item.type == "function_call" else item.input
        return f"{item.type} {_given(item.name, 'name', name)}: {_given(given, 'arguments or input', name)}"
    if item.type in _CALLS.values():
        if (item.type, _given(item.call_id, "call_id", name)) not in calls:
            raise InputError(
                f"{name}.call_id is {item.call_id!r}, which no call before it has",
                name=f"{name}.call_id",
                value=item.call_id,
                expected=[call_id for _, call_id in calls],
            )
        return f"{item.type}: {content_text(_given(item.output, 'output', name), f'{name}.output')}"
    known = ("message", *_CALLS, *_CALLS.values())
    raise InputError(
        f"{name}.type is {item.type[:100]!r}; it must be one of {', '.join(known)}",
        name=f"{name}.type",
        value=item.type,
        expected=known,
    )


def _part_text(part: InputPart, name: str) -> str:
    if "image" in part.type or "audio" in part.type or "video" in part.type or "file" in part.type:
        raise InputError(
            f"{name} is an {part.type[:100]!r}; this server takes text and JSON alone", name=name, value=part.type
        )
    text = json_text(part.data, compact=True) if part.type == "input_json" else (part.text or part.refusal)
    if part.type not in ("text", "input_text", "output_text", "refusal", "input_json"):
        raise InputError(
            f"{name}.type is {part.type[:100]!r}; it must be text, input_text, output_text, refusal or input_json",
            name=f"{name}.type",
            value=part.type,
        )
    return text or ""


def _given(value: Any, field: str, name: str) -> Any:
    if value is None:
        raise InputError(f"{name} lacks {field}", name=f"{name}.{field}")
    return value


def check_not_blank(text: str, name: str) -> str:
    if not text.strip():
        raise InputError(f"{name} is blank; give a text", name=name, value=text)
    return text

"""Fields that truncate texts: vLLM's for all prompts, those of text-embeddings-inference and Cohere for pooled ones."""

from __future__ import annotations

from typing import Literal

from moepass.models.errors import InputError
from moepass.runtime.serving.questions.text_encoding import Side, TextCut
from moepass.runtime.serving.routes.service import Call, ModelBody


class TruncatedBody(ModelBody, kw_only=True):
    """Truncates prompts to a number of tokens, or to the model's limit for -1. By default, long prompts are refused."""

    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None


class PooledBody(TruncatedBody, kw_only=True):
    """Truncates texts to the model's limit. Cohere's START and END are the side that is cut."""

    truncate: bool | Literal["NONE", "START", "END"] | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None


def text_cut(call: Call, body: TruncatedBody, default_side: Side = "right") -> TextCut | None:
    """Return how `body` asks to truncate its texts, or None. Raise InputError for fields that contradict each other."""
    asked, most = body.truncate_prompt_tokens, call.writer.most_tokens
    if asked is not None and (asked < -1 or asked == 0):
        raise InputError.wrong("truncate_prompt_tokens", asked, "1 or more, or -1 for the model's limit")
    limits = [] if asked is None else [(most if asked == -1 else asked, "truncate_prompt_tokens")]
    sides: dict[str, Side | None] = {"truncation_side": body.truncation_side}
    if isinstance(body, PooledBody):
        if body.truncate not in (None, False, "NONE"):
            limits.append((most, "truncate"))
        sides["truncate"] = {"START": "left", "END": "right"}.get(str(body.truncate))  # type: ignore[assignment]
        sides["truncation_direction"] = body.truncation_direction and body.truncation_direction.lower()  # type: ignore[assignment]
    given = {name: side for name, side in sides.items() if side is not None}
    if len({*given.values()}) > 1:
        text = f"{' and '.join(given)} ask to cut different ends of the texts; send one of them"
        raise InputError(text, name=[*given][-1])
    if not limits:
        return None
    limit, name = min(limits)
    return TextCut(limit, next(iter(given.values()), default_side), name)

"""Settings of a server. This module imports nothing heavy, so that wrong settings are refused before ranks start."""

from __future__ import annotations

import dataclasses

from moepass.models.errors import OptionError
from moepass.models.limits import MOST_WAIT_SECONDS


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server. Raises OptionError for invalid values.

    Clients may request the model under any of `model_names`; replies contain the first one. Without an API key, all
    clients are allowed. A request is cancelled after `timeout_seconds`, and a body must arrive within `read_seconds`.
    """

    model_names: tuple[str, ...]
    api_key: str | None = None
    timeout_seconds: float = 60.0
    read_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.model_names:
            raise OptionError("there is no model name; pass at least one", name="model_names", expected="1 or more")
        for name in self.model_names:
            if not name.strip():
                raise OptionError.wrong("model_names", name, "names that clients can ask for, such as my-model")
        if self.api_key == "":
            text = "the API key is empty; set a key, or omit the option to allow all clients"
            raise OptionError(text, name="api_key")
        if self.api_key is not None and (not self.api_key.isprintable() or self.api_key != self.api_key.strip()):
            raise OptionError(
                "the API key starts or ends with a space, or contains a control character such as a line break, which "
                "HTTP headers cannot contain; use another key",
                name="api_key",
            )
        for name in ("timeout_seconds", "read_seconds"):
            if not 0 < getattr(self, name) <= MOST_WAIT_SECONDS:
                raise OptionError.wrong(name, getattr(self, name), f"above 0 and at most {MOST_WAIT_SECONDS:g}")

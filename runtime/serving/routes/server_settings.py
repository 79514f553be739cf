"""What a server is told of its clients. Nothing heavy is imported here: it is checked before ranks are started."""

from __future__ import annotations

import dataclasses

from moepass.models.errors import OptionError
from moepass.models.limits import MOST_WAIT_SECONDS


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
    """`model_names` are those that clients may ask for, the first of them the one that answers call themselves.

    Without `api_key` everyone is answered. A request that waits and runs longer than `timeout_seconds` is given up, and
    so is one whose body takes longer than `read_seconds` to come.
    """

    model_names: tuple[str, ...]
    api_key: str | None = None
    timeout_seconds: float = 60.0
    read_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.model_names:
            raise OptionError("no model name is given; give at least one", name="model_names", expected="1 or more")
        for name in self.model_names:
            if not name.strip():
                raise OptionError.wrong("model_names", name, "names that clients can ask for, such as my-model")
        if self.api_key == "":
            raise OptionError("the API key is empty; give one, or none to let everyone in", name="api_key")
        if self.api_key is not None and (not self.api_key.isprintable() or self.api_key != self.api_key.strip()):
            raise OptionError(
                "the API key begins or ends with a blank, or holds a line break or another control character, which no "
                "HTTP header can carry; give one without",
                name="api_key",
            )
        for name in ("timeout_seconds", "read_seconds"):
            if not 0 < getattr(self, name) <= MOST_WAIT_SECONDS:
                raise OptionError.wrong(name, getattr(self, name), f"above 0 and at most {MOST_WAIT_SECONDS:g}")

"""The exception with which passes leave a block unchanged that does not fit a form."""

from __future__ import annotations

from typing import NoReturn

from torch.fx import Node

from moepass.passes.graph.source_lines import named


class NotThisForm(Exception):  # noqa: N818  control flow inside the passes: why a block does not fit
    """The block does not fit a form.

    The text becomes the reason of a refusal. It names a node as `name (operator)`: see `source_lines.py`.
    """


def refuse(node: Node, what: str) -> NoReturn:
    """Raise NotThisForm with the name of `node` before `what`."""
    raise NotThisForm(f"{named(node)} {what}")

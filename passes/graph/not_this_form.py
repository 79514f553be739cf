"""Why a block does not fit a form: what passes raise to leave it as it came."""

from __future__ import annotations


class NotThisForm(Exception):  # noqa: N818  control flow inside the passes: why a block does not fit
    """The text becomes the reason of a refusal. It names a node as `name (operator)`: see `source_lines.py`."""

"""The exception with which passes leave a block unchanged that does not fit a form."""

from __future__ import annotations


class NotThisForm(Exception):  # noqa: N818  control flow inside the passes: why a block does not fit
    """The block does not fit a form.

    The text becomes the reason of a refusal. It names a node as `name (operator)`: see `source_lines.py`.
    """

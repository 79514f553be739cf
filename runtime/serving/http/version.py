"""The version of the installed package, read from its metadata."""

from __future__ import annotations

from importlib import metadata

VERSION = metadata.version("moepass")

"""A report as one HTML page: nothing is fetched, nothing is installed, a browser opens the file."""

from __future__ import annotations

from importlib import resources

import msgspec

from moepass.explaining.report import Report
from moepass.explaining.report_text import source_text

_REPORT_MARK, _SOURCES_MARK, _TITLE_MARK = "@@REPORT@@", "@@SOURCES@@", "@@TITLE@@"


def report_page(report: Report) -> str:
    """The page `report.html` of this package with the report in it, as JSON and as what its script draws from that."""
    page = (resources.files("moepass.explaining") / "report.html").read_text(encoding="utf-8")
    # What ends a script element in HTML must not stand in it; JSON may write a less-than sign as an escape.
    json = msgspec.json.encode(report).decode().replace("<", "\\u003c")
    title = f"{report.model.name} on {report.hardware.name}"
    page = page.replace(_TITLE_MARK, _escaped(title)).replace(_SOURCES_MARK, _escaped(source_text(report)))
    return page.replace(_REPORT_MARK, json)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

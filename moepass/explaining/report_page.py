"""A report as one HTML page, which a browser opens from the file, without a server or a network."""

from __future__ import annotations

import re
from importlib import resources

import msgspec

from moepass.explaining.report_parts import ReportContent
from moepass.explaining.report_text import host_memory_text, serving_text, source_text, stored_text


def report_page(report: ReportContent) -> str:
    """Return the page `data/report.html` with the report inserted, as JSON for the page's script and as texts."""
    page = (resources.files("moepass.explaining") / "data/report.html").read_text(encoding="utf-8")
    # The JSON must not end its script element in the HTML, so less-than signs are escaped.
    json = msgspec.json.encode(report).decode().replace("<", "\\u003c")
    texts = {
        "@@TITLE@@": f"{report.model.name} on {report.hardware.name}",
        "@@CHECKPOINT@@": stored_text(report) if report.stored is not None else "",
        "@@HOST_MEMORY@@": host_memory_text(report) if report.memory is not None else "",
        "@@SERVING@@": serving_text(report),
        "@@SOURCES@@": source_text(report),
    }
    # One pass over the page, because the texts may contain marks.
    insertions = {mark: _escaped(text) for mark, text in texts.items()} | {"@@REPORT@@": json}
    return re.sub("|".join(insertions), lambda match: insertions[match[0]], page)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

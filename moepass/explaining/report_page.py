"""A report as one HTML page: nothing is fetched, nothing is installed, a browser opens the file."""

from __future__ import annotations

import re
from importlib import resources

import msgspec

from moepass.explaining.report_parts import ReportContent
from moepass.explaining.report_text import host_memory_text, serving_text, source_text, stored_text


def report_page(report: ReportContent) -> str:
    """The page `data/report.html` with the report in it, as JSON and as what its script draws from that."""
    page = (resources.files("moepass.explaining") / "data/report.html").read_text(encoding="utf-8")
    # The text must not end its script element in HTML; JSON may write a less-than sign as an escape.
    json = msgspec.json.encode(report).decode().replace("<", "\\u003c")
    texts = {
        "@@TITLE@@": f"{report.model.name} on {report.hardware.name}",
        "@@CHECKPOINT@@": stored_text(report) if report.stored is not None else "",
        "@@HOST_MEMORY@@": host_memory_text(report) if report.memory is not None else "",
        "@@SERVING@@": serving_text(report),
        "@@SOURCES@@": source_text(report),
    }
    # In one pass: what a name holds is no mark.
    made = {mark: _escaped(text) for mark, text in texts.items()} | {"@@REPORT@@": json}
    return re.sub("|".join(made), lambda match: made[match[0]], page)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

"""The report of `moepass explain`, with the forms in which it can be read: JSON, text, a web page, a trace."""

from __future__ import annotations

import msgspec

from moepass.explaining.report_page import report_page
from moepass.explaining.report_parts import REPORT_SCHEMA, ReportContent
from moepass.explaining.report_text import report_text
from moepass.passes.ir.timeline import Timeline, chrome_trace


class Report(ReportContent, frozen=True):
    """A report that can be converted to JSON, text, HTML and a trace."""

    def to_json(self) -> str:
        """Return the report as JSON, which `from_json` reads."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Report:
        """Read a report. Raises msgspec.ValidationError if `text` is not a report of this schema."""
        report = msgspec.json.decode(text, type=Report)
        if report.schema != REPORT_SCHEMA:
            raise msgspec.ValidationError(f"schema is {report.schema!r}, this version reads {REPORT_SCHEMA!r}")
        return report

    def text(self, width: int = 80, every_row: bool = False) -> str:
        """Return the report for a terminal, without colours. `every_row` adds the schedule of the captured graphs."""
        return report_text(self, width, every_row)

    def html(self) -> str:
        """Return the report as one self-contained HTML page."""
        return report_page(self)

    def trace(self) -> str:
        """Return the timeline for ui.perfetto.dev. Raises ValueError if nothing was scheduled."""
        if self.schedule is None:
            raise ValueError("the report has no timeline, because nothing was scheduled")
        timeline = Timeline(self.schedule.timeline, "derived")
        return chrome_trace({f"{self.model.name} on {self.hardware.name}, {self.schedule.strategy}": timeline})

    def __repr__(self) -> str:
        return f"<moepass report: {self.model.name} on {self.hardware.name}: {self.strategy.chosen}>"

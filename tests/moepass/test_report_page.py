"""The HTML report is self-contained, contains the JSON, and is drawn by a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from moepass.explaining.report import Report
from tests.helpers.graphs.report_helper import small_report

_NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in _NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def report() -> Report:
    return small_report()


def _embedded(page: str) -> str:
    (content,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    return str(content)


def test_the_page_holds_the_report(report: Report) -> None:
    assert Report.from_json(_embedded(report.html())) == report


def test_the_page_fetches_nothing(report: Report) -> None:
    page = report.html().replace(_embedded(report.html()), "")
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|<link|<img|<iframe|\bfetch\(|import\(| src=", page)


def test_a_name_with_markup_cannot_end_the_script(report: Report) -> None:
    name = "</script><b>&@@SOURCES@@"
    odd = msgspec.structs.replace(report, model=msgspec.structs.replace(report.model, name=name))
    page = odd.html()
    assert json.loads(_embedded(page))["model"]["name"] == name
    assert "<title>&lt;/script&gt;&lt;b&gt;&amp;@@SOURCES@@ on" in page


# Moves the mouse, and stores the displayed texts in attributes for the test.
_VISIT = """<script>
const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect();
const narrow = canvas.dataset.to - canvas.dataset.from;
const place = {clientX: box.left + box.width / 2, clientY: box.top + 25, bubbles: true, cancelable: true};
canvas.dispatchEvent(new PointerEvent("pointermove", place));
document.body.dataset.tip = document.getElementById("timeline-tip").textContent;
document.getElementById("whole").click();
document.body.dataset.whole = canvas.dataset.to - canvas.dataset.from;
canvas.dispatchEvent(new WheelEvent("wheel", {...place, deltaY: -1}));
document.body.dataset.zoomed = canvas.dataset.to - canvas.dataset.from;
document.body.dataset.narrow = narrow;
const curve = document.getElementById("curve"), frame = curve.getBoundingClientRect();
curve.dispatchEvent(new PointerEvent("pointermove", {clientX: frame.left + frame.width / 2, clientY: frame.top + 99}));
document.body.dataset.point = document.getElementById("curve-tip").textContent;
</script>"""


_MEASURE = """<script>
const page = document.documentElement, comparison = document.getElementById("comparison");
const hidden = box => box.scrollWidth - box.clientWidth;
parent.postMessage({wide: innerWidth, page: hidden(page), table: hidden(comparison.parentElement),
  columns: [...comparison.rows[0].cells].filter(cell => cell.offsetWidth > 0).length}, "*");
</script>"""
# A window of Chromium cannot be as narrow as a telephone, but a frame can.
_FRAME = """<iframe src="report.html" width="{width}" height="900" frameborder="0"></iframe>
<script>addEventListener("message", event => Object.assign(document.body.dataset, event.data));</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine to draw the page")
@pytest.mark.parametrize("width", [400, 1400])
def test_every_column_fits_on_a_telephone_and_on_a_screen(report: Report, tmp_path: Path, width: int) -> None:
    (tmp_path / "report.html").write_text(report.html().replace("</body>", _MEASURE + "</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(_FRAME.format(width=width))
    measured = dict(re.findall(r'data-(page|table|columns|wide)="([^"]*)"', _drawn(frame, tmp_path, "1500,1000")))
    assert measured == {"wide": str(width), "page": "0", "table": "0", "columns": "7"}


def _drawn(file: Path, folder: Path, window: str) -> str:
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={window}", "--virtual-time-budget=2000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine to draw the page")
def test_a_browser_draws_the_page_and_answers_the_mouse(report: Report, tmp_path: Path) -> None:
    assert report.schedule is not None
    file = tmp_path / "report.html"
    file.write_text(report.html().replace("</body>", _VISIT + "</body>"))
    drawn = _drawn(file, tmp_path, "1100,1500")
    # The page's script sets this at its end.
    assert 'data-drawn="yes"' in drawn
    assert f"<b>{report.strategy.chosen}</b>" in drawn
    assert drawn.count("<tr") >= len(report.comparison) + len(report.blocks)
    shown = dict(re.findall(r'data-(tip|whole|zoomed|narrow|point)="([^"]*)"', drawn))
    step_seconds = float(shown["whole"])
    assert step_seconds >= report.schedule.step_seconds
    assert 0 < float(shown["narrow"]) < step_seconds
    assert float(shown["zoomed"]) == pytest.approx(0.8 * step_seconds)
    assert re.search(r"layer \d+.*: .*, from .* to ", shown["tip"])
    assert re.search(r"tokens: .*, exposed", shown["point"])

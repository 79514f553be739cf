"""Files that documentation and comments mention exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "docs", "examples", "models", "moepass", "passes", "runtime", "tests")
# Results contain the file names of their time.
PAGES = [
    page
    for page in [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]
    if page.parent.name != "results"
]
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
_LINK = re.compile(r"\]\(([^)#\s]+)")
_PATH = re.compile(rf"\b((?:{'|'.join(FOLDERS)})/[\w/]+\.(?:py|md|json|html|svg))\b")
# A file name, or the end of a path.
_FILE = re.compile(r"[`(]([\w/]+\.py)[`)]")
_KNOWN = {"/".join(path.relative_to(ROOT).parts[start:]) for path in SOURCES for start in range(len(path.parts))}


def _missing(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        links = (link for link in _LINK.findall(text) if not link.startswith(("http:", "https:")))
        yield from (link for link in links if not (page.parent / link).exists())
    yield from (path for path in _PATH.findall(text) if not (ROOT / path).exists())
    yield from (name for name in _FILE.findall(text) if name not in _KNOWN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_link_only_to_existing_files(page: Path) -> None:
    assert list(_missing(page)) == []


def test_sources_mention_only_existing_files() -> None:
    missing_paths = {str(path.relative_to(ROOT)): list(_missing(path)) for path in SOURCES}
    assert {name: missing for name, missing in missing_paths.items() if missing} == {}

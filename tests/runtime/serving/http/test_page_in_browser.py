"""The status page in a real browser, with a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.serving.browser import BROWSER, Page, browser_page
from tests.helpers.serving.example_view import VIEW
from tests.helpers.serving.served import CHAT_TEMPLATE, Served, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine to draw the page"),
]

EVIL = "</textarea><img src=x onerror=document.title='evil'><script>document.title='evil'</script>"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def locked(checkpoint: Path) -> Iterator[Served]:
    with served(checkpoint, chat_template=CHAT_TEMPLATE, api_key="sésame") as running:
        running.backend.seen = VIEW
        yield running


@pytest.fixture
def page(tab: Page, chat: Served) -> Iterator[Page]:
    """The page, after it has received the server's state."""
    chat.backend.seen = VIEW
    tab.messages.clear()
    tab.open(f"{chat.url}/")
    tab.wait_for("document.querySelectorAll('.rank').length === 2")
    yield tab
    assert tab.messages == []


def text(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector({selector!r}).innerText"))


def texts(page: Page, selector: str) -> list[str]:
    inner_texts: list[str] = page.value(f"[...document.querySelectorAll({selector!r})].map(one => one.innerText)")
    return inner_texts


def ask(page: Page) -> None:
    page.value("document.getElementById('send').click()")
    page.wait_for("document.getElementById('send').innerText === 'Ask'")


def test_questions_of_all_kinds_are_answered_with_bars(page: Page, chat: Served) -> None:
    ask(page)
    assert texts(page, ".answer h3") == ["Is the customer unhappy?", "What is it about?", "How urgent is it?"]
    body = {
        "model": "tiny",
        "input": page.value("document.getElementById('input').value"),
        "questions": [
            {"type": "predicate", "instructions": "Is the customer unhappy?"},
            {
                "type": "choice",
                "instructions": "What is it about?",
                "choices": [{"value": value} for value in ("Delivery", "Price", "Quality")],
            },
            {
                "type": "score",
                "instructions": "How urgent is it?",
                "levels": [{"label": label} for label in ("not urgent", "should be answered today", "urgent")],
            },
        ],
    }
    predicate, choice, score = chat.post("/v1/decisions", body)["answers"]
    expected = [
        *(predicate["probability"], 1 - predicate["probability"]),
        *(entry["probability"] for entry in (*choice["probabilities"], *score["probabilities"])),
    ]
    assert texts(page, ".bars dd.value") == [f"{100 * value:.1f} %" for value in expected]
    widths = page.value("[...document.querySelectorAll('.answer .fill')].map(one => parseFloat(one.style.width))")
    assert widths == pytest.approx([100 * value for value in expected], abs=0.01)
    assert texts(page, ".answer .best")[1] == choice["choice"]
    assert "216 tokens" in text(page, "#usage")


def test_typed_html_stays_text(page: Page, chat: Served) -> None:
    page.value("document.getElementById('input').focus()")
    page.value("document.getElementById('input').select()")
    page.type(EVIL)
    page.value("document.querySelectorAll('.question button').forEach((one, number) => { if (number) one.click(); })")
    page.value("document.querySelector('.question input').focus(); document.querySelector('.question input').select()")
    page.type(EVIL)
    ask(page)
    assert texts(page, ".answer h3") == [EVIL]
    assert page.value("document.title") == "moepass"
    assert page.value("document.querySelectorAll('main img, main script').length") == 0


def test_the_page_shows_errors_of_the_server(page: Page, chat: Served) -> None:
    chat.backend.error = RuntimeError("a secret")
    try:
        ask(page)
        assert "secret" not in text(page, "#problem")
        assert text(page, "#problem").endswith(".")
    finally:
        chat.backend.error = None
    ask(page)
    assert page.value("document.getElementById('problem').hidden")
    page.messages.clear()  # the console logs the status 500


def test_the_page_focuses_the_field_that_is_missing(page: Page) -> None:
    page.value("document.querySelectorAll('.question textarea')[1].value = 'one alone'")
    ask(page)
    assert text(page, "#problem") == "Enter two choices or more, one per line."
    assert page.value("document.activeElement === document.querySelectorAll('.question textarea')[1]")


def test_the_page_can_be_used_with_the_keyboard_only(page: Page) -> None:
    page.value("document.getElementById('add').focus()")
    page.press("Enter")
    assert page.value("document.querySelectorAll('.question').length") == 4
    page.type("Is it new?")  # the new question has the focus
    page.press("Enter", is_control=True)
    page.wait_for("document.querySelectorAll('.answer').length === 4")
    page.value("document.querySelector('.question:last-child button').focus()")
    page.press(" ")
    assert page.value("document.querySelectorAll('.question').length") == 3
    assert page.value("document.activeElement.tagName") == "INPUT"
    seen = set()
    page.value("document.activeElement.blur()")
    for _ in range(25):
        page.press("Tab")
        seen.add(page.value("document.activeElement.id || document.activeElement.tagName"))
    assert seen >= {"key", "input", "SELECT", "INPUT", "TEXTAREA", "BUTTON", "add", "invariant", "send"}


def test_ranks_and_the_trie_of_the_last_step_are_shown(page: Page, chat: Served) -> None:
    assert texts(page, ".rank .state") == ["ready", "lost"]
    assert "30 FLOP in 3 requests; a full step is 50 FLOP, the limit is 120 FLOP" in text(page, ".rank")
    widths = "[...document.querySelectorAll('.rank .fill')].map(one => parseFloat(one.style.width))"
    load, cache, memory = page.value(widths)
    assert (load, cache, memory) == (25, 75, 75)
    assert "6 GB of 8 GB during a full step: weights 3 GB, step 2 GB, cache 1 GB" in text(page, ".rank")
    assert "9 tokens computed, 16 from the cache; without sharing and cache it would take 2.0" in text(page, "#step")
    assert "1 more node not drawn" in text(page, "#step")
    shapes = "[...document.querySelectorAll('#trie rect')].map(one => [one.getAttribute('class'), one.textContent])"
    assert page.value(shapes) == [
        ["cached", "16 tokens, from the cache"],
        ["computed", "9 tokens, computed; the output is read at 2 positions"],
    ]
    left = page.value("[...document.querySelectorAll('#trie rect')].map(one => Number(one.getAttribute('x')))")
    assert left[0] < left[1]


def test_the_page_shows_changes(page: Page, chat: Served) -> None:
    chat.backend.seen = type(VIEW)(VIEW.ranks[:1], waiting=40, running=2)
    page.wait_for("document.querySelectorAll('.rank').length === 1")
    assert "42" in text(page, "#cards")


def test_a_request_can_be_stopped(page: Page, chat: Served) -> None:
    cancelled = chat.backend.cancelled
    chat.backend.gate = asyncio.Event()
    try:
        page.value("document.getElementById('send').click()")
        page.wait_for("document.getElementById('send').innerText === 'Stop'")
        ask(page)
        assert "Stopped" in text(page, "#problem")
    finally:
        chat.backend.gate = None
    while chat.backend.cancelled == cancelled:
        page.value("new Promise(done => setTimeout(done, 10))")


def test_the_page_sends_the_key_and_stores_it_nowhere(tab: Page, locked: Served) -> None:
    tab.open(f"{locked.url}/")
    tab.wait_for("!document.getElementById('unseen').hidden")
    assert "requires an API key" in text(tab, "#unseen")
    for key, answer in (("wrong", "does not accept this API key"), ("sésame", "")):
        tab.value("document.getElementById('key').focus(); document.getElementById('key').select()")
        tab.type(key)
        tab.press("Enter")
        tab.wait_for(f"document.getElementById('unseen').innerText.includes({answer!r})")
    tab.wait_for("document.querySelectorAll('.rank').length === 2")
    ask(tab)
    assert len(texts(tab, ".answer")) == 3
    stored = tab.value("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert "same" not in stored
    tab.open(f"{locked.url}/")
    tab.wait_for("!document.getElementById('unseen').hidden")


def test_the_page_reports_a_server_that_has_ended(tab: Page, checkpoint: Path) -> None:
    with served(checkpoint, chat_template=CHAT_TEMPLATE) as running:
        tab.open(f"{running.url}/")
        tab.wait_for("document.getElementById('state').innerText === 'ready'")
    tab.wait_for("document.getElementById('unseen').innerText.includes('does not answer')")
    ask(tab)
    assert "does not answer" in text(tab, "#problem")


def test_the_page_lists_the_labels_of_the_model(tab: Page, demo: Served) -> None:
    tab.open(f"{demo.url}/")
    tab.wait_for("!document.getElementById('labels').hidden")
    ask(tab)
    assert texts(tab, ".answer .best") == ["German"]
    assert "69 labels" in text(tab, "#labels summary")


@pytest.mark.parametrize("width", [360, 800, 1280, 2200])
@pytest.mark.parametrize("is_dark", [False, True])
def test_it_fits_every_screen_and_both_colour_schemes(tab: Page, chat: Served, width: int, is_dark: bool) -> None:
    chat.backend.seen = VIEW
    tab.open(f"{chat.url}/", width, is_dark=is_dark)
    tab.wait_for("document.querySelectorAll('.rank').length === 2")
    ask(tab)
    assert tab.value("document.documentElement.scrollWidth") == width
    places = "[...document.querySelectorAll('main *')].map(one => one.getBoundingClientRect().right)"
    assert max(tab.value(places)) <= width
    brightness = tab.value(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((sum, one) => sum + Number(one), 0)"
    )
    assert (brightness < 3 * 64) == is_dark
